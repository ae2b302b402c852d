# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Two versions of the plugin on one node: driver and workers are compared before any actor gets a GPU."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import jetrl_verl


@pytest.fixture
def other_version(tmp_path) -> str:
    """A Python that has every package of this environment, and of this plugin version 0.0.9."""
    venv.create(tmp_path / "other", with_pip=False)
    (target,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (source,) = {Path(entry) for entry in sys.path if entry.endswith("site-packages") and Path(entry, "ray").is_dir()}
    for entry in source.iterdir():
        if "jetrl" not in entry.name:
            (target / entry.name).symlink_to(entry)
    package = Path(jetrl_verl.__file__).parent
    shutil.copytree(package, target / "jetrl_verl", ignore=shutil.ignore_patterns("__pycache__"))
    (information,) = source.glob("jetrl_verl-*.dist-info")
    copied = shutil.copytree(information, target / "jetrl_verl-0.0.9.dist-info")
    metadata = Path(copied, "METADATA")
    metadata.write_text(metadata.read_text().replace(f"Version: {jetrl_verl.__version__}", "Version: 0.0.9"))
    return str(tmp_path / "other" / "bin" / "python")


def test_workers_of_another_version_stop_the_driver(tmp_path, other_version):
    script = (
        "import ray\n"
        "from jetrl_verl.config import workers\n"
        "workers.install()\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False,\n"
        f"         runtime_env={{'py_executable': {other_version!r}}})\n"
        "print('not reached')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and "not reached" not in run.stdout, run.stderr
    (sentence,) = (line for line in run.stderr.splitlines() if line.startswith("jetrl_verl:"))
    assert f"the driver runs jetrl-verl {jetrl_verl.__version__}" in sentence
    assert f"{other_version} has jetrl-verl 0.0.9" in sentence and "; install " in sentence

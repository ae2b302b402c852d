# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m verl.trainer.main_ppo`` as a user starts it: output and exit status."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

RUNNABLE = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]


def main_ppo(tmp_path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # A user's environment: the flag needs no variable of the plugin.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "JETRL_"))}
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        cwd=tmp_path,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_cfg_job_prints_a_refusal_and_no_traceback(tmp_path):
    refused = main_ppo(tmp_path, "--cfg", "job", "precision=jet_fp8", "model_engine=megatron")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert (
        "model_engine=megatron is not supported with precision=jet_fp8: training runs under FSDP. Set model_engine=dp"
        in refused.stderr
    )
    assert "Traceback" not in refused.stderr


def test_a_damaged_input_stops_the_run_before_ray(tmp_path):
    broken = tmp_path / "train.parquet"
    broken.write_bytes(b"not parquet")
    run = main_ppo(
        tmp_path,
        "precision=jet_fp8",
        *RUNNABLE,
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",  # offline, and so left to the workers
        "critic.enable=False",
        f"data.train_files={broken}",
    )
    assert run.returncode == 1
    assert f"jetrl_verl: the data file {broken} (data.train_files) is not a readable parquet file" in run.stderr
    assert "Traceback" not in run.stderr
    assert "ray init kwargs" not in run.stdout


@pytest.fixture
def interpreter_without_plugin(tmp_path) -> str:
    """A Python that has every package of this environment except this one, like a uv environment before ``--with``."""
    venv.create(tmp_path / "bare", with_pip=False)
    (target,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    (source,) = {Path(entry) for entry in sys.path if entry.endswith("site-packages") and Path(entry, "ray").is_dir()}
    for entry in source.iterdir():
        if "jetrl" not in entry.name:
            (target / entry.name).symlink_to(entry)
    return str(tmp_path / "bare" / "bin" / "python")


def test_workers_without_the_plugin_stop_the_driver(tmp_path, interpreter_without_plugin):
    """``ray.init`` as verl's ``uv run`` examples call it: the workers' interpreter is not the driver's."""
    script = (
        "import sys, ray\n"
        "from jetrl_verl.config import workers\n"
        "workers.install()\n"
        "workers.install()\n"
        "options = dict(num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "ray.init(**options)\n"
        "print('same environment: passed', flush=True)\n"
        "ray.shutdown()\n"
        f"ray.init(**options, runtime_env={{'py_executable': {interpreter_without_plugin!r}}})\n"
        "print('not reached')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "same environment: passed" in run.stdout
    assert run.returncode == 1 and "not reached" not in run.stdout
    (sentence,) = (line for line in run.stderr.splitlines() if line.startswith("jetrl_verl:"))
    assert interpreter_without_plugin in sentence
    assert "does not have the plugin installed" in sentence and "uv run --with-editable /path/to/jetrl_verl" in sentence

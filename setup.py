# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compile csrc/ into the wheel if nvcc and torch are there; metadata is in pyproject.toml.

`pip install --no-build-isolation .` builds against the installed torch. Without nvcc, or in pip's isolated build, the
wheel holds Python only and uses Triton and vLLM's kernels; `make wheel` stops instead. The library uses torch's stable
ABI and no Python, so one wheel fits every Python 3; its platform tag is the glibc that the library needs. For editable
installs `make setup` runs `python scripts/build_csrc.py` on a machine with a GPU.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SCRIPT = ROOT / "scripts" / "build_csrc.py"
WHEEL = runpy.run_path(str(ROOT / "scripts" / "build_wheel.py"))
runpy.run_path(str(ROOT / "jetrl_verl" / "__init__.py"))  # stops if the link to patches/ is lost


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "jetrl_verl" / "kernels"
            optional = [] if os.environ.get(WHEEL["REQUIRED"]) == "required" else ["--optional"]
            subprocess.run([sys.executable, SCRIPT, *optional, "--target", target], check=True, stdout=sys.stderr)
            # Records name the commit, and an installed copy has no git.
            write_commit = runpy.run_path(str(ROOT / "jetrl_verl" / "tools" / "commit.py"))["write_commit"]
            write_commit(ROOT, Path(self.build_lib))


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        compiled = sorted(Path(self.bdist_dir).rglob("*.so"))
        return ("py3", "none", WHEEL["platform_tag"](compiled) if compiled else "any")

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False  # otherwise setuptools ignores the platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython})

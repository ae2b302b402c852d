# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The wheel: Python alone where nothing can be compiled, else one for every Python 3 of this platform."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--optional", action="store_true")
parser.add_argument("--target", type=pathlib.Path)
(parser.parse_args().target / "libjetrl_sm90.so").write_bytes(b"library")
"""


@pytest.fixture
def tree(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("jetrl_verl", "scripts", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def wheel(tree: Path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tree], cwd=tree, check=True, capture_output=True)
    (found,) = tree.glob("*.whl")
    return found


def test_without_nvcc_it_holds_python_alone(tree, monkeypatch):
    built = wheel(tree, monkeypatch)
    assert built.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(built).namelist()
    assert any(name.endswith("jetrl_verl/config/precision/jet_fp8.yaml") for name in names)
    assert not [name for name in names if name.endswith(".so")]


def test_what_was_compiled_travels_and_names_the_platform(tree, monkeypatch):
    (tree / "scripts" / "build_csrc.py").write_text(COMPILER)
    built = wheel(tree, monkeypatch)
    assert "-py3-none-linux_" in built.name
    (library,) = [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    assert library.endswith("jetrl_verl/kernels/libjetrl_sm90.so")

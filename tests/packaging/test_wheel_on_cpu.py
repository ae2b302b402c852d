# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The wheel: Python alone where nothing can be compiled, else one for every Python 3 of this platform."""

import platform
import shutil
import subprocess
import sys
import tarfile
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
    shutil.copy(ROOT / "MANIFEST.in", tmp_path)
    for name in ("jetrl_verl", "patches", "scripts", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    assert (tmp_path / "jetrl_verl" / "patches").is_symlink()
    return tmp_path


PATCHES = sorted(f"jetrl_verl/patches/{file.name}" for file in (ROOT / "patches").iterdir() if file.is_file())
"""What lies at the top of the tree and is imported as jetrl_verl.patches."""


def patches_in(names: list[str]) -> list[str]:
    """Names in a wheel, below the folder that a wheel for a platform keeps its Python in."""
    return sorted(name[name.index("jetrl_verl/patches/") :] for name in names if "jetrl_verl/patches/" in name)


def built(tree: Path, what: str, pattern: str) -> Path:
    build = f"import sys, setuptools.build_meta as backend; backend.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tree], cwd=tree, check=True, capture_output=True)
    (found,) = tree.glob(pattern)
    return found


def wheel(tree: Path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    return built(tree, "wheel", "*.whl")


def test_the_source_archive_has_the_patches_and_builds_the_same_wheel(tree, monkeypatch, tmp_path_factory):
    archive = built(tree, "sdist", "*.tar.gz")
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as files:
        files.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    names = zipfile.ZipFile(wheel(source, monkeypatch)).namelist()
    assert patches_in(names) == PATCHES


def test_an_editable_install_finds_the_patches(tree, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with zipfile.ZipFile(built(tree, "editable", "*.whl")) as files:
        files.extractall(tmp_path / "site")
    found = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r});"
        "from jetrl_verl.patches import source; print(source.__file__)"
    )
    run = subprocess.run([sys.executable, "-S", "-c", found], cwd="/", env={}, capture_output=True, text=True)
    assert Path(run.stdout.strip()).resolve() == tree / "patches" / "source.py", run.stderr


def committed(tree: Path) -> str:
    """Make ``tree`` a repository with everything in one commit; that commit."""
    git = ["git", "-C", str(tree), "-c", "user.name=Test", "-c", "user.email=test@localhost"]
    (tree / ".gitignore").write_text("build/\n*.egg-info/\n*.whl\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def commit_in(built: Path) -> str:
    archive = zipfile.ZipFile(built)
    (name,) = [name for name in archive.namelist() if name.endswith("jetrl_verl/_commit.txt")]
    return archive.read(name).decode()


def test_without_nvcc_it_holds_python_alone(tree, monkeypatch):
    made = wheel(tree, monkeypatch)
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert any(name.endswith("jetrl_verl/config/precision/jet_fp8.yaml") for name in names)
    assert patches_in(names) == PATCHES
    assert not [name for name in names if name.endswith(".so")]
    assert commit_in(made) == "unknown\n"


def test_what_was_compiled_travels_and_names_the_platform(tree, monkeypatch):
    (tree / "scripts" / "build_csrc.py").write_text(COMPILER)
    commit = committed(tree)
    made = wheel(tree, monkeypatch)
    assert made.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    (library,) = [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]
    assert library.endswith("jetrl_verl/kernels/libjetrl_sm90.so")
    assert commit_in(made) == f"{commit}\n"

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The wheel: only Python without nvcc, else compiled for every Python 3 of this platform."""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from build_wheel import platform_tag

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--optional", action="store_true")
parser.add_argument("--target", type=pathlib.Path)
(parser.parse_args().target / "libjetrl_sm90.so").write_bytes(b"library")
"""
LIBRARY = "jetrl_verl/kernels/libjetrl_sm90.so"
FILES = [path for suffix in ("py", "yaml") for path in (ROOT / "jetrl_verl").rglob(f"*.{suffix}")]
PACKAGE = {path.relative_to(ROOT).as_posix() for path in FILES}
PACKAGE |= {f"jetrl_verl/patches/{path.name}" for path in (ROOT / "patches").glob("*.py")}
"""Files of every wheel; patches/ at the top of the tree is imported as jetrl_verl.patches."""


def path_of(name: str) -> str:
    """A file of a wheel as it is installed; a wheel for a platform keeps its Python in a folder of its own."""
    return name.partition(".data/purelib/")[2] or name


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {path_of(name): files.read(name) for name in files.namelist() if not name.endswith("/")}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the sources of a wheel, without nvcc on PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("jetrl_verl", "patches", "scripts", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    return tmp_path


def built(tree: Path, what: str, pattern: str) -> Path:
    build = f"import sys, setuptools.build_meta as backend; backend.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tree], cwd=tree, check=True, capture_output=True)
    (file,) = tree.glob(pattern)
    return file


def test_without_nvcc_the_wheel_has_only_python(tree, tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(tree, "sdist", "*.tar.gz")) as files:
        files.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    wheel = built(source, "wheel", "*.whl")
    files = contents(wheel)
    assert wheel.name.endswith("-py3-none-any.whl") and files["jetrl_verl/_commit.txt"] == b"unknown\n"
    assert files.keys() >= PACKAGE and not [name for name in files if name.endswith((".so", ".cu", ".cuh"))]
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == {"jetrl_verl"}


def test_an_editable_install_finds_the_patches(tree, tmp_path):
    with zipfile.ZipFile(built(tree, "editable", "*.whl")) as files:
        files.extractall(tmp_path / "site")
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r});"
        "from jetrl_verl.patches import source; print(source.__file__)"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd="/", env={}, capture_output=True, text=True)
    assert Path(run.stdout.strip()).resolve() == tree / "patches" / "source.py", run.stderr


def test_a_compiled_wheel_has_the_library_the_platform_and_the_commit(tree):
    (tree / "scripts" / "build_csrc.py").write_text(COMPILER)
    (tree / ".gitignore").write_text("build/\n*.egg-info/\n*.whl\n")
    git = ["git", "-C", str(tree), "-c", "user.name=Test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True).stdout
    wheel = built(tree, "wheel", "*.whl")
    files = contents(wheel)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    assert files[LIBRARY] == b"library" and files["jetrl_verl/_commit.txt"] == commit and files.keys() >= PACKAGE


@pytest.mark.parametrize(
    ("symbols", "glibc"),
    [
        ((), "2_28"),
        (("GLIBC_2.32", "GLIBCXX_3.4.26"), "2_32"),
        (("GLIBC_2.14", "GLIBCXX_3.4.9", "GLIBCXX_3.4.30"), "2_35"),
    ],
)
def test_the_platform_tag_is_the_oldest_with_every_symbol(tmp_path, symbols, glibc):
    (tmp_path / "lib.so").write_bytes(b"\x7fELF\0" + b"".join(symbol.encode() + b"\0" for symbol in symbols))
    assert platform_tag([tmp_path / "lib.so"]) == f"manylinux_{glibc}_{platform.machine()}"


def test_an_unknown_libstdcxx_is_an_error(tmp_path):
    (tmp_path / "lib.so").write_bytes(b"\0GLIBCXX_3.4.99\0")
    with pytest.raises(ValueError, match="GLIBCXX_3.4.99; add it to build_wheel.py"):
        platform_tag([tmp_path / "lib.so"])


def test_the_library_of_a_built_wheel_links_torch_and_cuda_and_no_python(tmp_path):
    """The wheel that ``make wheel`` left in dist/, or ``JETRL_WHEEL``: compiling takes longer than a test may."""
    named = os.environ.get("JETRL_WHEEL")
    wheels = [Path(named)] if named else sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    files = contents(wheels[-1]) if wheels else {}
    if any(files.get(name) != (ROOT / name).read_bytes() for name in PACKAGE):
        pytest.skip("dist/ holds no wheel of this tree: run `make wheel` where there is an nvcc")
    library = files[LIBRARY]
    (tmp_path / "lib.so").write_bytes(library)
    assert wheels[-1].name.endswith(f"-py3-none-{platform_tag([tmp_path / 'lib.so'])}.whl")
    assert not [word for word in (b"libtorch_python", b"PyObject", b"libpython") if word in library]
    for needed in (b"libtorch_cpu.so\0", b"libtorch_cuda.so\0", b"libcudart.so.", b"sm_90a"):
        assert needed in library

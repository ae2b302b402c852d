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

from jetrl_verl.sources import source_files, sources_sha256

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--optional", action="store_true")
parser.add_argument("--target", type=pathlib.Path)
(parser.parse_args().target / "libjetrl_sm90.so").write_bytes(b"library")
"""
LIBRARY = "jetrl_verl/kernels/libjetrl_sm90.so"
PACKAGE = {f"jetrl_verl/{name}" for name in source_files(suffixes=(".py", ".yaml"))}
"""Files of every wheel."""


def path_of(name: str) -> str:
    """A file of a wheel as it is installed; a wheel for a platform keeps its Python in a folder of its own."""
    return name.partition(".data/purelib/")[2] or name


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {path_of(name): files.read(name) for name in files.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources of a wheel."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("jetrl_verl", "patches", "scripts", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    return folder


@pytest.fixture
def tree(checkout, tmp_path):
    """A copy to change."""
    ignored = shutil.ignore_patterns("*.egg-info", "*.tar.gz", "*.whl")
    return shutil.copytree(checkout, tmp_path / "tree", ignore=ignored, symlinks=True)


def built(tree: Path, what: str, pattern: str) -> Path:
    """The file that setuptools builds where there is no nvcc."""
    build = f"import sys, setuptools.build_meta as backend; backend.build_{what}(sys.argv[1])"
    env = {**os.environ, "PATH": "/usr/bin:/bin", "CUDA_HOME": "/nowhere"}
    subprocess.run([sys.executable, "-c", build, tree], cwd=tree, env=env, check=True, capture_output=True)
    (file,) = tree.glob(pattern)
    return file


@pytest.fixture(scope="module")
def sites(checkout, tmp_path_factory) -> dict[str, Path]:
    """Kind of installation -> the folder where a Python finds the package; the wheel is built from an sdist."""
    folder = tmp_path_factory.mktemp("sites")
    with tarfile.open(built(checkout, "sdist", "*.tar.gz")) as files:
        files.extractall(folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    shutil.unpack_archive(built(checkout, "editable", "*.whl"), folder / "editable", "zip")
    wheel = built(source, "wheel", "*.whl")
    for kind in ("prefix", "target"):
        uv = [sys.executable, "-m", "uv", "pip", "install", "--offline", "--no-deps", f"--{kind}", folder / kind, wheel]
        subprocess.run(uv, check=True, capture_output=True)
    (site,) = folder.glob("prefix/lib/*/site-packages")
    return {"checkout": checkout, "editable": folder / "editable", "wheel": site, "target": folder / "target"}


@pytest.mark.parametrize("kind", ["checkout", "editable", "wheel", "target"])
def test_every_installation_has_the_patches_and_the_same_sources(sites, kind):
    code = (
        f"import site; site.addsitedir({str(sites[kind])!r}); from jetrl_verl.patches import source;"
        "from jetrl_verl.sources import sources_sha256; print(sources_sha256())"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd="/", env={}, capture_output=True, text=True)
    assert run.stdout.strip() == sources_sha256(), run.stderr


def test_a_copy_without_the_link_to_the_patches_is_neither_built_nor_imported(tree):
    (tree / "jetrl_verl" / "patches").unlink()
    (tree / "jetrl_verl" / "patches").write_text("../patches")
    for words in (["setup.py", "--version"], ["-c", "import jetrl_verl"]):
        run = subprocess.run([sys.executable, *words], cwd=tree, env={}, capture_output=True, text=True)
        assert run.returncode and "lost its symbolic link to ../patches. Clone it with git" in run.stderr


def test_without_nvcc_the_wheel_has_only_python(sites):
    (wheel,) = sites["target"].parent.glob("sdist/*/*.whl")
    files = contents(wheel)
    assert wheel.name.endswith("-py3-none-any.whl") and files["jetrl_verl/_commit.txt"] == b"unknown\n"
    assert files.keys() >= PACKAGE and not [name for name in files if name.endswith((".so", ".cu", ".cuh"))]
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == {"jetrl_verl"}


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

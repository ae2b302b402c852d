# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The wheel with the Hopper kernels: its platform, what is in it, and that it works where there is no nvcc.

Compiling takes longer than a test may, so what looks at a whole wheel takes the one that `make wheel` left in dist/, or
``JETRL_WHEEL``, and says why it is skipped where there is none of this tree.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from build_wheel import platform_tag, versions  # noqa: E402

MACHINE = platform.machine()


def library(tmp_path: Path, *symbols: str) -> Path:
    """A file that names versions of symbols as a string table does."""
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF\0" + b"".join(symbol.encode() + b"\0" for symbol in symbols))
    return path


@pytest.mark.parametrize(
    ("symbols", "glibc"),
    [
        ((), "2_28"),
        (("GLIBC_2.14", "GLIBC_2.2.5"), "2_28"),
        (("GLIBC_2.32", "GLIBCXX_3.4.26"), "2_32"),
        (("GLIBC_2.14", "GLIBCXX_3.4.9", "GLIBCXX_3.4.30"), "2_35"),
        (("GLIBC_2.9", "GLIBC_2.34"), "2_34"),
    ],
)
def test_the_platform_is_the_oldest_that_has_every_symbol(tmp_path, symbols, glibc):
    assert platform_tag([library(tmp_path, *symbols)]) == f"manylinux_{glibc}_{MACHINE}"


def test_a_libstdcxx_that_is_not_known_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="GLIBCXX_3.4.99; add it to build_wheel.py"):
        platform_tag([library(tmp_path, "GLIBCXX_3.4.99")])


def test_versions_are_read_from_a_library_that_was_compiled_here(tmp_path):
    source, built = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("#include <string>\nstd::string f(std::string a) { return a + a; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", built, source], check=True)
    found = versions(built.read_bytes(), "GLIBCXX")
    assert found and all(version[:2] == (3, 4) for version in found)
    # It runs here, so its platform is no newer than this machine.
    here = tuple(map(int, platform.libc_ver()[1].split(".")))
    assert tuple(map(int, re.findall(r"\d+", platform_tag([built]))[:2])) <= max(here, (2, 28))


def test_without_nvcc_make_wheel_stops_with_a_sentence(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "/nowhere"}
    command = [sys.executable, ROOT / "scripts/build_wheel.py", "--out", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if shutil.which("nvcc", path=environment["PATH"]):
        pytest.skip("an nvcc lies in /usr/bin")
    assert done.returncode == 1 and done.stderr.startswith("make wheel: no nvcc is on the PATH")
    assert not list(tmp_path.iterdir())


# --- a wheel that was built ------------------------------------------------------------------------------------------


def sources(package: Path) -> dict[str, str]:
    files = (Path(place, name) for place, _, names in os.walk(package, followlinks=True) for name in names)
    return {
        file.relative_to(ROOT).as_posix(): sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.suffix in (".py", ".yaml", ".json", ".html")
    }


def path_of(name: str) -> str:
    """A file of a wheel as it is installed; a wheel for a platform keeps its Python in a folder of its own."""
    return name.partition(".data/purelib/")[2] or name


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = os.environ.get("JETRL_WHEEL")
    found = [Path(named)] if named else sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("dist/ holds no wheel: run `make wheel` where there is an nvcc")
    with zipfile.ZipFile(found[-1]) as files:
        held = {path_of(name): sha256(files.read(name)).hexdigest() for name in files.namelist()}
    ours = sources(ROOT / "jetrl_verl")
    if {name: held.get(name) for name in ours} != ours:
        pytest.skip(f"{found[-1].name} was made from other sources: run `make wheel` again")
    return found[-1]


def test_its_name_says_any_python_3_and_the_platform_of_its_library(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".so")]
        (tmp_path / "lib.so").write_bytes(files.read(name))
        (tags,) = [name for name in files.namelist() if name.endswith(".dist-info/WHEEL")]
        tags = Parser().parsestr(files.read(tags).decode()).get_all("Tag")
    tag = f"py3-none-{platform_tag([tmp_path / 'lib.so'])}"
    assert wheel.name.endswith(f"-{tag}.whl") and tags == [tag]
    assert path_of(name) == "jetrl_verl/kernels/libjetrl_sm90.so"


def test_its_library_has_no_python_and_finds_torch_and_cuda_by_name(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".so")]
        content = files.read(name)
    assert b"libtorch_python" not in content and b"PyObject" not in content and b"libpython" not in content
    for needed in (b"libtorch_cpu.so\0", b"libtorch_cuda.so\0", b"libcudart.so."):
        assert needed in content
    assert b"sm_90a" in content


def test_it_holds_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = {path_of(name) for name in files.namelist() if not name.endswith("/")}
    for name in (
        "jetrl_verl/patches/weight_sync.py",
        "jetrl_verl/config/precision/jet_fp8.yaml",
        "jetrl_verl/config/clip/calibrated.yaml",
        "jetrl_verl/config/correction/adaptive.yaml",
        "jetrl_verl/tools/report.html",
        "jetrl_verl/tools/advise/rates.json",
        "jetrl_verl/_commit.txt",
    ):
        assert name in names, name
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not re.fullmatch(r"jetrl_verl-.*\.(dist-info|data)", top)} == {"jetrl_verl"}
    assert not [name for name in names if "test" in Path(name).name or name.endswith((".cu", ".cuh", ".pyc"))]


def test_its_entry_points_are_those_of_the_project(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("entry_points.txt")]
        text = files.read(name).decode()
    for group, entries in (("console_scripts", project["scripts"]), *project["entry-points"].items()):
        section = text.partition(f"[{group}]")[2].partition("[")[0]
        for key, value in entries.items():
            assert f"{key} = {value}" in section


def test_a_fresh_environment_without_nvcc_installs_it_and_the_doctor_finds_the_library(wheel, tmp_path):
    """Its own pip installs the file, with nothing else and without an index; the stack comes from this interpreter's
    packages, through a .pth file."""
    made = tmp_path / "fresh"
    venv.create(made, with_pip=True)
    python = made / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CUDA_HOME")}
    environment |= {"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if shutil.which("nvcc", path=environment["PATH"]):
        pytest.skip("an nvcc lies in /usr/bin")
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    done = subprocess.run(install, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = made.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as files:
        held = {path_of(name): files.read(name) for name in files.namelist() if not name.endswith("/")}
    package = {name: content for name, content in held.items() if name.startswith("jetrl_verl/")}
    assert all((site / name).read_bytes() == content for name, content in package.items())
    for script in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]:
        assert (made / "bin" / script).stat().st_mode & 0o111, script
    digest = sha256(held["jetrl_verl/kernels/libjetrl_sm90.so"]).hexdigest()
    stack = [path for path in sys.path if path.endswith("site-packages")]
    (site / "stack.pth").write_text("\n".join(stack) + "\n")
    command = [made / "bin" / "jetrl", "doctor", "--no-ray", "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    report = json.loads(done.stdout)
    findings = report if isinstance(report, list) else report["findings"]
    found = {finding["subject"]: finding for finding in findings}
    assert digest in found["Hopper kernels"]["found"] and found["Hopper kernels"]["state"] == "ok"
    assert str(site) in found["jetrl-verl"]["found"]
    assert found["plugin in verl"]["state"] == "ok" and found["plugin in vLLM"]["state"] == "ok", done.stdout

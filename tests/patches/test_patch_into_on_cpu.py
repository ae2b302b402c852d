# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl patch --into``: a checkout gets the replacements, which pass their tests; the plugin does not apply them."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetrl_verl import patches as package
from jetrl_verl.cli import app
from jetrl_verl.patches import all_patches
from jetrl_verl.patches.patch import PATCHED, STOCK, Patch

TESTS = Path(__file__).parents[1]
OWN_TESTS = {
    "patches/test_attention_name_on_cpu.py": "",
    "patches/test_cpu_platform_on_cpu.py": "",
    "patches/test_generation_on_cpu.py": "",
    "patches/test_log_probs_on_cpu.py": "",
    "patches/test_micro_batches_on_cpu.py": "",
    "patches/test_replay_buffer_on_cpu.py": "",
    "patches/test_weight_sync_on_cpu.py": "",
    "faults/test_two_runs_on_cpu.py": "::test_the_patched_sender_and_receiver_share_an_address",
    "faults/test_damaged_checkpoint_on_cpu.py": "::test_a_tracker_with_a_missing_checkpoint_is_refused",
    "metrics/test_mismatch_on_cpu.py": "",
}
"""Test files of patches, with the test where a file has others."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """verl and vLLM as installed: copies of the files that are patched, links to all others."""
    folder = tmp_path_factory.mktemp("checkout")
    for project in ("verl", "vllm"):
        (source,) = importlib.util.find_spec(project).submodule_search_locations
        shutil.copytree(
            source, folder / project, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in {patch.path for patch in all_patches()}:
        original = os.readlink(folder / path)
        (folder / path).unlink()
        shutil.copy(original, folder / path)
    return folder


def states(folder: Path) -> list[str]:
    return [patch.state_in((folder / patch.path).read_text()) for patch in all_patches()]


def run(*words: str):
    return CliRunner().invoke(app, ["patch", *words])


def test_every_module_that_defines_a_patch_is_listed():
    """The plugin would apply an unlisted patch, but ``jetrl patch`` and ``jetrl doctor`` would not show it."""
    folder = Path(package.__file__).parent
    trees = {file.stem: ast.parse(file.read_text()) for file in folder.rglob("*.py")}
    defining = {
        name
        for name, tree in trees.items()
        if any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Patch") for node in ast.walk(tree))
    }
    assert sorted(defining) == list(package.MODULES)
    for name in package.MODULES:
        module = importlib.import_module(f"{package.__name__}.{name}")
        made = [value for value in vars(module).values() if isinstance(value, Patch)]
        assert {id(patch) for patch in made} == {id(patch) for patch in module.PATCHES}, name
    replaced = [patch.replaces for patch in all_patches()]
    assert len(set(replaced)) == len(replaced)


def test_a_checkout_is_patched_and_the_diff_is_printed(checkout):
    before = states(checkout)
    assert set(before) == {STOCK}
    dry = run("--into", str(checkout), "--dry-run")
    assert dry.exit_code == 0 and states(checkout) == before, "a dry run writes nothing"
    done = run("--into", str(checkout))
    assert done.exit_code == 0 and set(states(checkout)) == {PATCHED}
    assert done.stdout == dry.stdout
    assert run("--into", str(checkout / "verl")).stdout == "", "the second call changes nothing"
    # git applies the diff to the pinned sources, with the same result.
    again = checkout / "again"
    for patch in all_patches():
        (again / patch.path).parent.mkdir(parents=True, exist_ok=True)
        (source,) = importlib.util.find_spec(patch.project).submodule_search_locations
        shutil.copy(Path(source).parent / patch.path, again / patch.path)
    subprocess.run(["git", "apply"], cwd=again, input=done.stdout, text=True, check=True)
    assert all((again / patch.path).read_text() == (checkout / patch.path).read_text() for patch in all_patches())


@pytest.mark.slow
def test_the_patches_own_tests_pass_on_a_patched_checkout(checkout):
    assert run("--into", str(checkout)).exit_code == 0
    tests = [f"{TESTS / file}{test}" for file, test in OWN_TESTS.items()]
    run_there = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "--gpu=never", "-p", "no:warnings", "-p", "left_alone", *tests],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(checkout), str(TESTS.parent), str(TESTS), str(Path(__file__).parent)]),
            "JETRL_TEST_CHECKOUT": str(checkout),
        },
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run_there.returncode == 0, run_there.stdout + run_there.stderr
    assert "not left alone" not in run_there.stdout
    assert run_there.stdout.count("left alone: ") == len(all_patches())


def test_a_changed_function_is_refused_and_nothing_is_written(tmp_path):
    for patch in all_patches():
        if patch.project == "verl":
            (source,) = importlib.util.find_spec("verl").submodule_search_locations
            (tmp_path / patch.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(source).parent / patch.path, tmp_path / patch.path)
    (tmp_path / "verl/__init__.py").touch()
    changed = tmp_path / "verl/trainer/ppo/v1/replay_buffer.py"
    changed.write_text(changed.read_text().replace("time.sleep(self.poll_interval)", "time.sleep(1)"))
    before = {path: path.read_text() for path in tmp_path.rglob("*.py")}
    refused = run("--into", str(tmp_path))
    assert refused.exit_code == 1
    assert "ReplayBuffer._wait_for_next_poll" in refused.stderr and "Install verl 0.9.1." in refused.stderr
    assert {path: path.read_text() for path in tmp_path.rglob("*.py")} == before

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The build of a result: from git, from the file of an installed copy, and in the note under a table."""

import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.steps import builds_note, described
from jetrl_verl import __version__
from jetrl_verl.kernels import native
from jetrl_verl.sources import sources_sha256
from jetrl_verl.tools import provenance
from jetrl_verl.tools.commit import FILE, UNKNOWN, commit_of, write_commit

ROOT = Path(__file__).parents[2]
VERSIONS = ["torch", "triton", "verl", "vllm", "gpu", "driver"]
KEYS = ["commit", "dirty", "version", "sources_sha256", "kernel_library_sha256", *VERSIONS]


@pytest.fixture
def fresh(monkeypatch):
    """No cached build, before and after."""
    provenance._provenance.cache_clear()
    yield monkeypatch
    provenance._provenance.cache_clear()


@pytest.fixture
def repository(tmp_path):
    """A checkout with one commit, and a function that runs git in it."""

    def git(*words: str) -> str:
        options = ["-c", "user.name=Test", "-c", "user.email=test@localhost"]
        result = subprocess.run(["git", "-C", str(tmp_path), *options, *words], check=True, capture_output=True)
        return result.stdout.decode().strip()

    (tmp_path / "jetrl_verl").mkdir()
    (tmp_path / "jetrl_verl" / "module.py").write_text("one = 1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "One")
    return tmp_path, git


def build(
    commit: str = "a" * 40, dirty: bool | None = False, sources: str = "s" * 64, library: str | None = None
) -> dict:
    return {
        **dict.fromkeys(KEYS),
        **{"commit": commit, "dirty": dirty, "sources_sha256": sources, "kernel_library_sha256": library},
    }


def test_provenance_names_what_a_result_depends_on(fresh, tmp_path):
    library = tmp_path / "libjetrl_sm90.so"
    fresh.setattr(native, "library_path", lambda: library)
    assert provenance.provenance()["kernel_library_sha256"] is None
    provenance._provenance.cache_clear()
    library.write_bytes(b"library")
    build = provenance.provenance()
    assert list(build) == KEYS
    assert build["kernel_library_sha256"] == sha256(b"library").hexdigest()
    assert build["version"] == __version__ and build["sources_sha256"] == sources_sha256()
    assert build["commit"] == commit_of(ROOT)[0] and build["verl"] and build["torch"]
    build["commit"] = "changed by a caller"
    assert provenance.provenance()["commit"] == commit_of(ROOT)[0]


def test_gpu_and_driver_come_from_nvidia_smi(fresh, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\necho 'NVIDIA H200, 570.1'\n")
    program.chmod(0o755)
    fresh.setenv("PATH", str(tmp_path), prepend=":")
    assert provenance.nvidia_smi() == 2 * [("NVIDIA H200", "570.1")]
    build = provenance.provenance()
    assert (build["gpu"], build["driver"]) == ("NVIDIA H200", "570.1")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert provenance.nvidia_smi() == []


def test_commit_and_changes_of_a_checkout(repository):
    root, git = repository
    commit = git("rev-parse", "HEAD")
    assert commit_of(root) == (commit, False)
    (root / "outputs.json").write_text("{}")  # not a source
    assert commit_of(root) == (commit, False)
    (root / "jetrl_verl" / "new.py").write_text("")
    assert commit_of(root) == (commit, True)


def test_an_installed_copy_has_the_commit_of_its_build(repository, tmp_path):
    root, git = repository
    commit, installed = git("rev-parse", "HEAD"), tmp_path / "site-packages"
    write_commit(root, installed)
    assert commit_of(installed) == (commit, False)
    (root / "jetrl_verl" / "module.py").write_text("one = 2\n")
    write_commit(root, installed)
    assert commit_of(installed) == (commit, True)


def test_a_surrounding_repository_is_not_the_commit_of_an_installed_copy(repository):
    root, _ = repository
    installed = root / "lib" / "site-packages"
    (installed / "jetrl_verl").mkdir(parents=True)
    assert commit_of(installed) == (UNKNOWN, None)
    write_commit(installed, installed)
    assert (installed / FILE).read_text() == "unknown\n" and commit_of(installed) == (UNKNOWN, None)


@pytest.mark.parametrize(
    "other",
    [
        build(commit="b" * 40),
        build(dirty=True),
        build(commit=UNKNOWN, dirty=None),
        build(sources="t" * 64),
        build(library="l" * 64),
    ],
)
def test_results_of_two_builds_are_named(other):
    note = builds_note({"one": [build()], "two": [build(), other]})
    assert note.startswith("Results of 2 builds side by side")
    assert f"{described(build())}: one, two" in note and f"{described(other)}: two" in note


def test_the_note_names_a_single_build():
    alike = build() | {"torch": "2.11.0"}  # versions of others are not part of a build's identity
    assert builds_note({"one": [build()], "two": [alike]}) == f"Build: {described(build())}."
    assert builds_note({}) == ""


@pytest.mark.parametrize(
    "build,words",
    [
        (build(library="0123456789" * 6), "commit aaaaaaaaaa, kernel library 01234567"),
        (build(dirty=True), "commit aaaaaaaaaa with changes (sources ssssssss), no kernel library"),
        (build(commit=UNKNOWN, dirty=None), "commit unknown (sources ssssssss), no kernel library"),
    ],
)
def test_a_build_is_described_in_a_few_words(build, words):
    assert described(build) == words

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Commit of a tree: from git in a checkout, elsewhere from a file that ``setup.py`` wrote.

``setup.py`` runs this before the package is installed, so it imports the standard library only.
"""

import subprocess
from pathlib import Path

UNKNOWN = "unknown"
FILE = Path("jetrl_verl") / "_commit.txt"
"""Holds the commit, and ``dirty`` if the tree had changes."""

_SOURCES = ("jetrl_verl", "patches", "csrc", "scripts", "setup.py", "benchmarks", ":!benchmarks/results")


def commit_of(root: Path) -> tuple[str, bool | None]:
    """Commit of the tree ``root``, and whether files that results depend on differ from it.

    ``("unknown", None)`` without git and ``FILE``. A repository above ``root`` does not count.
    """
    if (root / ".git").exists():
        try:
            commit = _git(root, "rev-parse", "HEAD").strip()
            return commit, bool(_git(root, "status", "--porcelain", "--", *_SOURCES).strip())
        except (OSError, subprocess.CalledProcessError):
            pass  # no git, or a checkout that git does not trust
    try:
        commit, *rest = (root / FILE).read_text().split()
    except (OSError, ValueError):
        return UNKNOWN, None
    return commit, None if commit == UNKNOWN else rest == ["dirty"]


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout


def write_commit(root: Path, target: Path) -> None:
    """Write ``FILE`` below ``target`` for a copy of the tree ``root``."""
    commit, dirty = commit_of(root)
    (target / FILE).parent.mkdir(parents=True, exist_ok=True)
    (target / FILE).write_text(f"{commit}{' dirty' if dirty else ''}\n")

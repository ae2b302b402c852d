# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which commit a tree is: asked of git in a checkout, of a file that ``setup.py`` wrote elsewhere.

``setup.py`` runs this file before the package is installed, so it imports the standard library alone. Whoever copies a
tree without ``.git`` can write the file too: ``git rev-parse HEAD > jetrl_verl/_commit.txt``.
"""

import subprocess
from pathlib import Path

UNKNOWN = "unknown"
FILE = Path("jetrl_verl") / "_commit.txt"
"""Below the folder that has the package: the commit, and a second word ``dirty`` where the tree had changes."""

_SOURCES = ("jetrl_verl", "patches", "csrc", "scripts", "setup.py", "benchmarks", ":!benchmarks/results")


def commit_of(root: Path) -> tuple[str, bool | None]:
    """Commit of the tree ``root`` and whether files that results depend on differ from it.

    ``("unknown", None)`` where neither git nor ``FILE`` tells. A repository further up is someone else's: a virtual
    environment often lies in one.
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

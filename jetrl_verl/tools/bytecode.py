# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Bytecode of the packages that every process of a run imports. Without it each of them compiles again, which takes
20 to 50 s of processor time instead of 5 to 10."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path

PACKAGES = ("torch", "transformers", "ray", "verl", "vllm")
"""The large ones."""


def has_bytecode(package: Path) -> bool:
    """Whether most Python files below a folder have bytecode of this interpreter; some have it after any import."""
    sources = [Path(folder) / name for folder, _, names in os.walk(package) for name in names if name.endswith(".py")]
    return 2 * sum(os.path.exists(cache_from_source(str(source))) for source in sources) >= len(sources)


def folders_without() -> dict[Path, list[str]]:
    """Folder of installed packages -> those of ``PACKAGES`` in it that have no bytecode."""
    missing: dict[Path, list[str]] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        package = Path(spec.origin).parent
        if not has_bytecode(package):
            missing.setdefault(package.parent, []).append(name)
    return missing


def command_for(folders: Mapping[Path, object]) -> list[str]:
    """Command that compiles all packages in ``folders`` on all cores."""
    return [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, folders)]


def start_compiling(folders: Mapping[Path, object]) -> subprocess.Popen | None:
    """Start :func:`command_for`; None if there is nothing to write. It may fail on templates that are not Python."""
    quiet = subprocess.DEVNULL
    writable = {folder: names for folder, names in folders.items() if sys.pycache_prefix or os.access(folder, os.W_OK)}
    return subprocess.Popen(command_for(writable), stdin=quiet, stdout=quiet, stderr=quiet) if writable else None

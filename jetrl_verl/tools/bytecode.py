# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Bytecode of the packages that every process of a run imports: where it is missing, each process compiles again.

A run of verl starts six processes one after another that import torch, verl and vLLM. With bytecode on the disk an
import takes 5 to 10 s of processor time; without, 20 to 50. Python leaves bytecode where it imports, but not where
``PYTHONDONTWRITEBYTECODE`` is set, as in many images, and the first process of each kind compiles anyway.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path

PACKAGES = ("torch", "transformers", "ray", "verl", "vllm")
"""The large ones; what they import lies in the same folders."""


def has_bytecode(package: Path) -> bool:
    """Whether most Python files below a folder have bytecode that this interpreter reads.

    Most, since whoever imported the package alone has left the bytecode of what it then imported.
    """
    sources = [Path(folder) / name for folder, _, names in os.walk(package) for name in names if name.endswith(".py")]
    return 2 * sum(os.path.exists(cache_from_source(str(source))) for source in sources) >= len(sources)


def folders_without() -> dict[Path, list[str]]:
    """Folder of installed packages -> those of ``PACKAGES`` in it whose bytecode is missing; nothing is imported."""
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
    """Program that compiles all packages in ``folders``, a process for each core."""
    return [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, folders)]


def start_compiling(folders: Mapping[Path, object]) -> subprocess.Popen | None:
    """:func:`command_for`, started; None where nothing is missing, or nothing can be written.

    Its status says nothing: packages hold templates that are no Python.
    """
    quiet = subprocess.DEVNULL
    written = {folder: names for folder, names in folders.items() if sys.pycache_prefix or os.access(folder, os.W_OK)}
    return subprocess.Popen(command_for(written), stdin=quiet, stdout=quiet, stderr=quiet) if written else None

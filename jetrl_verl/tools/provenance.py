# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The build that made a result: :func:`provenance` goes into every record, :func:`builds_note` under every table.

Two records are of one build if commit, sources and kernel library are the same."""

import copy
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jetrl_verl.config.installed import installed_version
from jetrl_verl.sources import PACKAGE, sources_sha256
from jetrl_verl.tools.commit import UNKNOWN, commit_of

_IDENTITY = ("commit", "dirty", "sources_sha256", "kernel_library_sha256")


def provenance() -> dict[str, Any]:
    """This process's build, for JSON: ``commit`` (or ``unknown``), ``dirty``, ``version``, ``sources_sha256``,
    ``kernel_library_sha256``, versions of ``torch``, ``triton``, ``verl`` and ``vllm``, ``gpu`` and ``driver``; None
    for what is absent."""
    return copy.deepcopy(_provenance())


@cache
def _provenance() -> dict[str, Any]:
    from jetrl_verl import __version__
    from jetrl_verl.kernels import native

    commit, dirty = commit_of(PACKAGE.parent)
    gpus = nvidia_smi()
    return {
        "commit": commit,
        "dirty": dirty,
        "version": __version__,
        "sources_sha256": sources_sha256(),
        "kernel_library_sha256": native.library_sha256(),
        **{name: installed_version(name) for name in ("torch", "triton", "verl", "vllm")},
        "gpu": ", ".join(dict.fromkeys(name for name, _ in gpus)) or None,
        "driver": gpus[0][1] if gpus else None,
    }


def nvidia_smi() -> list[tuple[str, str]]:
    """Name and driver version of each GPU; asks nvidia-smi, because torch would keep a context on the GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = answer.stdout.splitlines() if answer.returncode == 0 else []
    return [(name, driver) for name, comma, driver in (row.partition(", ") for row in rows) if comma]


def describe(build: Mapping[str, Any]) -> str:
    """A build in a few words."""
    commit, library = build["commit"], build["kernel_library_sha256"]
    words = f"commit {commit if commit == UNKNOWN else commit[:10]}"
    if build["dirty"] is not False:
        words += f"{' with changes' if build['dirty'] else ''} (sources {build['sources_sha256'][:8]})"
    return f"{words}, " + (f"kernel library {library[:8]}" if library else "no kernel library")


def builds_note(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The sentence under a table of ``records`` (name of a record -> its builds): which build made them."""
    groups: dict[tuple, tuple[str, list[str]]] = {}
    for name, builds in records.items():
        for build in builds:
            names = groups.setdefault(tuple(build[key] for key in _IDENTITY), (describe(build), []))[1]
            names.extend([name] if name not in names else [])
    if len(groups) <= 1:
        return "".join(f"Build: {words}." for words, _ in groups.values())
    listed = "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.values())
    return f"Results of {len(groups)} builds side by side; a difference may come from the code. {listed}."

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The build that made a result: :func:`provenance` goes into every record."""

import copy
import shutil
import subprocess
from functools import cache
from typing import Any

from jetrl_verl.config.installed import installed_version
from jetrl_verl.sources import PACKAGE, sources_sha256
from jetrl_verl.tools.commit import commit_of


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

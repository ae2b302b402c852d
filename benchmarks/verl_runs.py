# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of real verl as the benchmarks start them: the environment, what a CPU needs, and figures of the steps."""

import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.launch import RunPaths, build_environment
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.progress import last_errors
from jetrl_verl.tools.report import Run, load_run

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "step")
"""Of verl's ``timing_s/*``."""

ON_A_CPU = (
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.checkpoint_engine.",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine",
    "data.dataloader_num_workers",
    "ray_kwargs.ray_init.",
    "reward.num_workers",
    "transfer_queue.",
)
"""Keys whose values a run on a CPU takes from the demo: few processes, small buffers, nothing that a CPU lacks."""


def words_on_a_cpu() -> list[str]:
    """Overrides with which a job that is written for a GPU runs on a CPU, but for its sizes."""
    nowhere = Path("unused")
    demo = build_overrides("bf16", Prepared(nowhere, {}), RunPaths(nowhere), "cpu", 1)
    return [word for word in demo if word.lstrip("+").startswith(ON_A_CPU)]


def environment_of(paths: RunPaths, cpu: bool) -> dict[str, str]:
    """Environment of a run whose metrics go to ``paths.metrics``."""
    environment = build_environment(paths, "cpu" if cpu else "cuda")
    # vLLM calls ninja by name.
    return environment | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}


def run_verl(command: Sequence[str], environment: Mapping[str, str], paths: RunPaths, steps: int) -> dict:
    """Run ``command`` to its end, and leave nothing of it behind but its files in ``paths``.

    Returns:
        ``status`` (1 too where it took fewer than ``steps`` steps), ``seconds``, and :func:`figures` of what it logged;
        ``errors`` of a run that failed.
    """
    started = time.monotonic()
    with ProcessTree(command, environment, paths.log) as tree:
        for _ in tree.follow():
            pass
        status = tree.poll()
    found = {"status": status, "seconds": round(time.monotonic() - started, 1), "steps": 0}
    if paths.metrics.exists() and paths.metrics.stat().st_size:
        found |= figures(load_run(paths.folder))
    if status == 0 and found["steps"] != steps:
        found["status"] = 1
    if found["status"]:
        found["errors"] = last_errors(paths.log)
    return found


def figures(run: Run) -> dict:
    """Steps with a finite gradient, extremes over all steps, and the median seconds of each phase behind the first.

    The first step compiles, so it is left out where there is another.
    """
    steps = [data for _, data in run.records if "actor/grad_norm" in data]
    if not steps:
        return {"steps": 0}

    def largest(key: str) -> float | None:
        values = [data[key] for data in steps if data.get(key) is not None]
        return max(values) if values else None

    def typical(key: str) -> float | None:
        values = [data[key] for data in steps[1:] or steps if key in data]
        return statistics.median(values) if values else None

    # verl writes a NaN as null.
    finite = [data for data in steps if data["actor/grad_norm"] is not None and math.isfinite(data["actor/grad_norm"])]
    return {
        "steps": len(finite),
        "k3_kl": largest("rollout_corr/k3_kl"),
        "grad_norm": largest("actor/grad_norm"),
        "response_length": typical("response_length/mean"),
        "peak_gib": largest("actor/perf/max_memory_allocated_gb"),
        **{f"{phase}_s": typical(f"timing_s/{phase}") for phase in PHASES},
    }


def table(runs: Sequence[Mapping], names: Sequence[str], columns: Sequence[str]) -> Table:
    """One row per run: its ``names``, then figures, right-aligned; a dash where there is none."""
    shown = Table(box=SIMPLE_HEAD)
    for name in names:
        shown.add_column(name)
    for column in columns:
        shown.add_column(column.replace("_", " "), justify="right")
    for found in runs:
        values = (found.get(column) for column in columns)
        cells = ("-" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)
        shown.add_row(*(str(found[name]) for name in names), *cells)
    return shown


FIGURES = ("status", "steps", "k3_kl", "grad_norm", "response_length", "peak_gib", *(f"{p}_s" for p in PHASES))
"""Columns of :func:`table` that every run has."""

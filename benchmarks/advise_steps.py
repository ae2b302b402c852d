# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a record of ``jetrl advise`` is (benchmarks/advise_rates.py), and the records in results of
benchmarks/verl_step.py."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published_shapes import PUBLISHED, is_mixture
from benchmarks.recipe_memory import sizes_of
from jetrl_verl.tools.advise.job import Job
from jetrl_verl.tools.advise.predict import Prediction, precisions, predict
from jetrl_verl.tools.advise.rates import Rates


@dataclass(frozen=True)
class Record:
    """One measured figure.

    Attributes:
        phase: of a step, or a part of one. case: model and sizes. measured: seconds, or GiB in ``memory``.
        calibrates: whether a rate was fitted to it; otherwise it checks. source: of the figure.
        predict: the same figure from rates.
        caveat: why the measurement is not of what is predicted; such a record neither calibrates nor checks.
    """

    phase: str
    case: str
    measured: float
    source: str
    predict: Callable[[Rates], float]
    calibrates: bool = False
    caveat: str = ""

    def error(self, rates: Rates) -> float:
        """(predicted - measured) / measured."""
        return self.predict(rates) / self.measured - 1


COLUMN_OF_ROW = {
    "bf16": "bf16",
    "bf16_best": "bf16, Liger",
    "bf16_shared": "bf16_shared",
    "fp8_rollout": "fp8_rollout",
    "jet_fp8": "jet_fp8",
    "jet_fp8_exact": "jet_fp8",
}
"""Row of benchmarks/verl_step.py -> column of a report; ``verl_fp8`` has none, for want of a rate."""

PHASE_OF_FIGURE = {
    "gen_s": "generation",
    "old_log_prob_s": "old log-probabilities",
    "update_actor_s": "update",
    "update_weights_s": "weight sync",
    "step_s": "step",
}
VARLEN = "attn_implementation=jetrl_varlen"
LONGEST_PROMPT = 512
"""Of benchmarks/verl_step.py, as are the sizes in :func:`_job_of_run`."""


def _job_of_run(run: dict, settings: dict) -> Job:
    """The job of one run of benchmarks/verl_step.py: one GPU, packed, one update a step."""
    words = run["words"]
    length = LONGEST_PROMPT + run["response"]
    micro = max(16384, length)
    return Job(
        sizes_of(run["model"], None),
        settings["sequences"] // 4,
        4,
        run["prompt_length"],
        min(run["response_length"], run["response"]),
        LONGEST_PROMPT,
        run["response"],
        gpus=1,
        utilization=settings["memory"],
        micro_tokens=micro,
        log_prob_tokens=micro,
        varlen=any(word.endswith(VARLEN) for word in words),
        eight_bit=any(word.endswith("AdamW8bit") for word in words),
    )


BEFORE = "a rollout with shared operations as before 455f00e: its attention, launches and clock have changed since"
BUILDS_BEFORE = ("2c1adaa27db3041aa1a2bda75d9ae2ab5afa0e08", "8522eeae51150c33914595a5e88119e4c0c832ec")
"""Commits of such builds in the records that are read here and in advise_rates.py."""


def rollout_caveat(build: Mapping[str, Any], shared: bool) -> str:
    """``BEFORE`` where a record's ``build`` is one of those, for an engine with shared operations."""
    return BEFORE if shared and build["commit"] in BUILDS_BEFORE else ""


def _caveat(phase: str, moved: bool, mixture: bool, replaced: str) -> str:
    """Of a phase's seconds: whether weights move in it, whether the model has experts, what is said of its rollout."""
    if mixture:
        return "of a mixture, which no rate is for"
    if replaced and phase in ("generation", "step"):
        return replaced
    return "weights move to the host and back" if moved and phase != "generation" else ""


def step_records(files: Iterable[Path]) -> Iterable[Record]:
    """What runs of benchmarks/verl_step.py say; none calibrates.

    Args:
        files: its results, as it writes them.

    Raises:
        ValueError: one of a tiny model on a CPU.
    """
    for file in files:
        settings = json.loads(file.read_text())
        if settings["tiny"]:
            raise ValueError(f"{file} has steps of a tiny model on a CPU, which no rate is for.")
        for run in settings["runs"]:
            cut = run["model"] not in PUBLISHED  # some of its layers
            if cut or not run.get("steps") or run["row"] not in COLUMN_OF_ROW:
                continue
            job = _job_of_run(run, settings)
            moved = any(word.endswith("param_offload=True") for word in run["words"])
            mixture = is_mixture(run["model"])
            shared = COLUMN_OF_ROW[run["row"]] in ("jet_fp8", "bf16_shared")
            replaced = rollout_caveat(run.get("build") or settings["build"], shared)
            case = f"verl, {run['model']}, {settings['sequences']} x {run['response']}, {run['row']}"

            def predicted(rates: Rates, job: Job = job, row: str = run["row"]) -> Prediction:
                (column,) = [each for each in precisions(job, True) if each.name == COLUMN_OF_ROW[row]]
                return predict(rates, job, column)

            for figure, phase in PHASE_OF_FIGURE.items():
                if run.get(figure) is None:
                    continue
                yield Record(
                    phase,
                    case,
                    run[figure],
                    file.name,
                    lambda r, p=predicted, w=phase: p(r).step if w == "step" else p(r).phases[w].seconds,
                    caveat=_caveat(phase, moved, mixture, replaced),
                )
            if run.get("engine_tokens_per_s"):
                yield Record(
                    "generation",
                    f"{case}, the engine alone",
                    settings["sequences"] * run["response_length"] / run["engine_tokens_per_s"],
                    file.name,
                    lambda r, p=predicted: p(r).schedule.seconds,
                    caveat=replaced,
                )

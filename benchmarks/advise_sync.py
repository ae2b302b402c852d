# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of a weight sync without verl's processes (benchmarks/weight_sync.py), and the rates of ``jetrl advise`` that
are fitted to them.

What both sides launch is counted on a CPU, layers as thin as the formats allow: counts are exact, and of the code as it
is. What a launch takes is measured on a GPU.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.advise_steps import OLD_SYNC, Record, recorded
from benchmarks.published_shapes import NARROW
from jetrl_verl.tools.advise.rates import Rates
from jetrl_verl.tools.advise.shapes import KNOWN, Model, model_of
from jetrl_verl.tools.advise.sync import LOADS_OF_A_LAYER, stacks, stock_work, sync_seconds, work
from jetrl_verl.train.gather import TOGETHER_BYTES

TIMED = "weight_sync_4b_h200.json"
SHAPES = ("1.7b", "4b", "8b")
"""Of Qwen3, counted; the second one checks."""

LAUNCHES = "launches of a sync"
"""Phase of the records that are counts."""


def counted(shape: str) -> str:
    """Name of the record of a shape's counts."""
    return f"weight_sync_narrow_{shape.replace('.', '_')}_cpu.json"


def narrow(shape: str) -> tuple[Model, int]:
    """The model of :func:`counted`, and how many bytes of it are gathered together: as many layers as at the real
    width."""
    known = KNOWN[f"qwen3-{shape}"]
    thin, real = model_of("narrow", known | NARROW), model_of(shape, known)
    return thin, int(TOGETHER_BYTES * thin.in_layers / real.in_layers)


def stacks_of(shape: str) -> int:
    model, together = narrow(shape)
    return stacks(model, together)


def launches(counts: Mapping) -> int:
    """Operators that both sides call, views and the probes of the contract check apart."""
    parts = (counts[side]["operators"][part] for side in ("sender", "receiver") for part in ("stream", "quantizer"))
    return sum(sum(part.values()) for part in parts)


def _seconds(precision: str, probes: bool) -> float:
    """Of both sides: the probes, or all else; the median of the runs."""
    runs = recorded(TIMED)["precisions"][precision]["runs"]

    def of(run: Mapping) -> float:
        parts = [(name, value) for side in ("sender", "receiver") for name, value in run[side].items()]
        return sum(value for name, value in parts if (name == "probes") == probes)

    return statistics.median(of(run) for run in runs)


def _four() -> Model:
    return model_of("qwen3-4b", KNOWN["qwen3-4b"])


def sync_records() -> Iterable[Record]:
    for shape in SHAPES:
        model, together = narrow(shape)
        for precision in ("bf16", "jet_fp8"):
            found = launches(recorded(counted(shape))["precisions"][precision]["counts"])
            if precision == "bf16":
                predict: Callable[[Rates], float] = lambda r, m=model: stock_work(m).launches  # noqa: E731
            else:
                predict = lambda r, s=shape, m=model: (  # noqa: E731
                    r["sync.launches"] + r["sync.launches_of_a_stack"] * stacks_of(s) + LOADS_OF_A_LAYER * m.layers
                )
            calibrates = precision != "bf16" and shape != SHAPES[1]
            case = f"Qwen3-{shape.upper()}'s layers, {precision}"
            yield Record(LAUNCHES, case, found, counted(shape), predict, calibrates)
    four, timed = _four(), recorded(TIMED)["precisions"]
    for precision, rate, moved in (
        ("bf16", "sync.verl.launch", lambda rates: stock_work(four).moved),
        ("jet_fp8", "sync.ours.launch", lambda rates: work(rates, four, "fp8").moved),
    ):
        count, probes = launches(timed[precision]["counts"]), precision != "bf16"
        yield Record(
            "weight sync",
            f"4B, both sides alone, {count} launches, {precision}",
            _seconds(precision, False) + (_seconds(precision, True) if probes else 0.0),
            TIMED,
            lambda r, n=count, one=rate, b=moved, p=probes: (
                n * r[one] + b(r) / r["bandwidth"] + (r["sync.probes"] if p else 0.0)
            ),
            calibrates=True,
        )


def fit_sync(put: Callable[..., None], rates: Callable[..., Rates]) -> None:
    """Launches by stacks from the smallest and the largest shape; what a launch takes from both sides at 4B."""
    few, many = SHAPES[0], SHAPES[-1]
    rest = {
        shape: launches(recorded(counted(shape))["precisions"]["jet_fp8"]["counts"])
        - LOADS_OF_A_LAYER * narrow(shape)[0].layers
        for shape in (few, many)
    }
    slope = (rest[many] - rest[few]) / (stacks_of(many) - stacks_of(few))
    how = f"{counted(few)} and {counted(many)}, counts"
    put("sync.launches", rest[few] - slope * stacks_of(few), "launches", how)
    put("sync.launches_of_a_stack", slope, "launches", how)
    four, record = _four(), recorded(TIMED)
    older = OLD_SYNC.in_build(record["build"])
    for name, precision, moved in (
        ("verl", "bf16", stock_work(four).moved),
        ("ours", "jet_fp8", work(rates(), four, "fp8").moved),
    ):
        left = _seconds(precision, False) - moved / rates()["bandwidth"]
        seconds = left / launches(record["precisions"][precision]["counts"])
        how = f"{TIMED}, 4B {precision}, both sides less their bytes, by launches"
        put(f"sync.{name}.launch", seconds, "s", how, older if name == "ours" else "")
    put("sync.probes", _seconds("jet_fp8", True), "s", f"{TIMED}, 4B jet_fp8, both sides", older)


def fit_gpus(
    put: Callable[..., None], rates: Callable[..., Rates], cases: Sequence[tuple[Model, int, float]], how: str
) -> None:
    """A gather, and a byte of the weights of each GPU but one, from BF16's sync of two sizes: two equations with two
    unknowns.

    Args:
        cases: model, GPUs of one host, seconds.
    """
    rows, left = [], []
    for model, gpus, seconds in cases:
        done = stock_work(model)
        rows.append((float(done.gathers), (gpus - 1) * done.held))
        left.append(seconds - sync_seconds(rates(), model, "bf16", False, 1))
    gather, gpu = np.linalg.solve(np.array(rows), np.array(left))
    put("sync.gather", gather, "s", f"{how}, by tensors")
    put("sync.gpu", gpu, "s/B", f"{how}, by bytes of the weights of each GPU but one")

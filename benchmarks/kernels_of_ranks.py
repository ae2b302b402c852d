# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine's decode steps run on each of its GPUs, kernel by kernel, on the profiler's clock.

For ``engine_over_ranks.py --kernels``. A step that takes longer than its kernels is one in which the GPU waits: for the
host, or at its end for another rank. A rank that arrives early waits inside a reduction, so of each rank the reductions
say how far it is ahead, too.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.timeline import Kernel, kernels_in, shares_of

TOKENS, STEPS = 1064, 48
"""Tokens of a response at whose end the recording stands, and how many steps it holds, at most."""
_BEHIND = 4
"""Steps behind the recording, so that all requests are alive to its end."""
_EDGE = 4
"""Steps at either end of the recording that are left out: it waits for the GPU before the first one."""


def window(longest: int) -> tuple[int, int, int]:
    """Tokens of a response, the first step that is recorded, and how many are; a response may have ``longest``."""
    tokens, steps = min(longest, TOKENS), min(longest // 3, STEPS)
    return tokens, tokens - steps - _BEHIND, steps


def begin(worker: Any, first: int, steps: int) -> None:
    """In a vLLM worker: record the ``steps`` steps from the ``first`` one on, as the engine asks for them."""
    stock, calls, cuda = worker.execute_model, Counter(), torch.cuda.is_available()
    trace = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["steps"] += 1
        if calls["steps"] in (first, first + steps) and cuda:
            torch.cuda.synchronize()
        if calls["steps"] == first:
            trace.start()
            calls["began_ns"] = time.perf_counter_ns()
        if calls["steps"] == first + steps:
            calls["took_ns"] = time.perf_counter_ns() - calls["began_ns"]
            trace.stop()
        return stock(*args, **kwargs)

    worker.execute_model = counted
    worker.jetrl_recording = (stock, trace, calls)


def end(worker: Any, steps: int) -> dict:
    """What :func:`begin` recorded (:func:`summary`), with ``host_us``: a step's time on the host, the recording's begin
    in it. Without a GPU that alone.

    Raises:
        BenchError: the engine asked for fewer steps.
    """
    worker.execute_model, trace, calls = worker.jetrl_recording
    del worker.jetrl_recording
    if "took_ns" not in calls:
        if "began_ns" in calls:
            trace.stop()
        raise BenchError(f"The engine made {calls['steps']} steps, too few for a recording: set longer responses.")
    found = {"host_us": 1e-3 * calls["took_ns"] / steps}
    return found | (summary(kernels_in(trace), steps) if torch.cuda.is_available() else {})


def boundary(kernels: Sequence[Kernel], steps: int) -> str:
    """A kernel that each step runs once; of several the last one of a step.

    Raises:
        BenchError: there is none.
    """
    counts = Counter(kernel.name for kernel in kernels)
    once = [kernel.name for kernel in kernels if abs(counts[kernel.name] - steps) <= 1]
    if not once:
        raise BenchError(f"No kernel runs once in each of {steps} steps: see what else the engine does.")
    return once[-1]


def busy_us(kernels: Sequence[Kernel]) -> float:
    """In which at least one of them runs; by their begin."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return total


def summary(kernels: Sequence[Kernel], steps: int) -> dict:
    """``step_us``, from one step's end to the next one's, ``busy_us``, in which the GPU runs something, and ``shares``,
    each kernel's runs and us a step. Medians over steps.

    Args:
        kernels: by their begin.

    Raises:
        BenchError: too few steps.
    """
    name = boundary(kernels, steps)
    at = [place for place, kernel in enumerate(kernels) if kernel.name == name][_EDGE:-_EDGE]
    if len(at) < 2:
        raise BenchError(f"{steps} steps are too few for a median, {_EDGE} at either end apart: set longer responses.")
    steps_at = list(pairwise(at))
    spans = [list(kernels[first + 1 : last + 1]) for first, last in steps_at]
    return {
        "step_us": median(kernels[last].end - kernels[first].end for first, last in steps_at),
        "busy_us": median(busy_us(span) for span in spans),
        "shares": [share._asdict() for share in shares_of(spans)],
    }


def record(call: Callable[..., list], generate: Callable[[], object], first: int, steps: int) -> list[dict]:
    """Of each rank what :func:`end` says.

    Args:
        call: vLLM's ``collective_rpc``. generate: makes the engine decode. first, steps: from :func:`window`.
    """
    call(begin, args=(first, steps))
    generate()
    return call(end, args=(steps,))

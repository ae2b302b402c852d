# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine's decode steps run on each of its GPUs, kernel by kernel, on the profiler's clock.

For ``engine_over_ranks.py --kernels``. A step that takes longer than its kernels is one in which the GPU waits. The
kernel behind a gap says what it waited for: the host, if the host launches that kernel by itself, outside of a CUDA
graph. A rank that arrives early waits inside a reduction, so of each rank the reductions say how far it is ahead, too.

A worker's host is in one of vLLM's two calls of a step or waits for the engine's next call, which comes when the tokens
of an earlier step have left the GPU: what the two calls take is its own work. That is taken in the steps in front of
the recording, as the profiler makes launches slower, and the three add up to such a step. Of the two calls the thread's
time on a core is less where it sleeps, as behind another thread that has the interpreter's lock; a wait that spins, as
most of CUDA's and of vLLM's do, counts as running.
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
CALLS = ("execute_model", "sample_tokens")
"""Of a worker, by the engine, in each step; both in the same thread."""
HOST = ("engine", *CALLS)
"""Where a worker's host is: waiting for the engine's next call, or in one of the two."""
_WAITS = 8
"""Waits of a step that are kept."""
_EDGE = 4
"""Steps at either end of the recording that are left out: it waits for the GPU before the first one."""


def window(longest: int) -> tuple[int, int, int]:
    """Tokens of a response, the first step that is recorded, and how many are; a response may have ``longest``."""
    tokens, steps = min(longest, TOKENS), min(longest // 3, STEPS)
    return tokens, tokens - steps - _BEHIND, steps


def begin(worker: Any, first: int, steps: int) -> None:
    """In a vLLM worker: record ``steps`` steps from the ``first`` one on, as the engine asks for them, and where the
    host is, and what of it this thread runs, in as many steps in front of them."""
    stock, calls, cuda = (worker.execute_model, worker.sample_tokens), Counter(), torch.cuda.is_available()
    trace = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    host, on_core, since, ran = Counter(), Counter(), time.perf_counter_ns(), time.thread_time_ns()

    def ends(part: str) -> None:
        nonlocal since, ran
        now, now_ran = time.perf_counter_ns(), time.thread_time_ns()
        if first - steps <= calls["steps"] < first:
            host[part] += now - since
            on_core[part] += now_ran - ran
        since, ran = now, now_ran

    def counted(*args: Any, **kwargs: Any) -> Any:
        ends("engine")
        calls["steps"] += 1
        if calls["steps"] in (first, first + steps) and cuda:
            torch.cuda.synchronize()
        if calls["steps"] == first:
            trace.start()
            calls["began_ns"] = time.perf_counter_ns()
        if calls["steps"] == first + steps:
            calls["took_ns"] = time.perf_counter_ns() - calls["began_ns"]
            trace.stop()
        output = stock[0](*args, **kwargs)
        ends("execute_model")
        return output

    def sampled(*args: Any, **kwargs: Any) -> Any:
        ends("engine")
        output = stock[1](*args, **kwargs)
        ends("sample_tokens")
        return output

    worker.execute_model, worker.sample_tokens = counted, sampled
    worker.jetrl_recording = (stock, trace, calls, host, on_core)


def end(worker: Any, steps: int) -> dict:
    """What :func:`begin` recorded (:func:`summary`), with ``host_us``: a step's time on the host, the recording's begin
    in it, and of a step in front of it ``host_parts_us``, each of ``HOST``, and ``on_core_us``, what of it the worker's
    thread ran. Without a GPU these alone.

    Raises:
        BenchError: the engine asked for fewer steps.
    """
    (worker.execute_model, worker.sample_tokens), trace, calls, host, on_core = worker.jetrl_recording
    del worker.jetrl_recording
    if "took_ns" not in calls:
        if "began_ns" in calls:
            trace.stop()
        raise BenchError(f"The engine made {calls['steps']} steps, too few for a recording: set longer responses.")
    parts, ran = ({part: 1e-3 * each[part] / steps for part in HOST} for each in (host, on_core))
    found = {"host_us": 1e-3 * calls["took_ns"] / steps, "host_parts_us": parts, "on_core_us": ran}
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


def waits_us(kernels: Sequence[Kernel]) -> Counter:
    """In which none of them runs, by the name of the kernel that follows; nothing is in front of the first one.

    Args:
        kernels: by their begin.
    """
    waits, until = Counter(), kernels[0].end
    for kernel in kernels[1:]:
        waits[kernel.name] += max(0.0, kernel.begin - until)
        until = max(until, kernel.end)
    return waits


def busy_us(kernels: Sequence[Kernel]) -> float:
    """In which at least one of them runs; by their begin."""
    return max(kernel.end for kernel in kernels) - kernels[0].begin - waits_us(kernels).total()


def summary(kernels: Sequence[Kernel], steps: int) -> dict:
    """A step's figures, medians over steps: ``step_us``, from one step's end to the next one's, ``busy_us``, in which
    the GPU runs something, ``shares``, each kernel's runs and us; and as a mean ``waits``, us in which it runs nothing
    by the kernel that follows, the longest ones.

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
    waits = waits_us(kernels[at[0] : at[-1] + 1])
    return {
        "step_us": median(kernels[last].end - kernels[first].end for first, last in steps_at),
        "busy_us": median(busy_us(span) for span in spans),
        "shares": [share._asdict() for share in shares_of(spans)],
        "waits": {name: us / len(spans) for name, us in waits.most_common(_WAITS)},
    }


def record(call: Callable[..., list], generate: Callable[[], object], first: int, steps: int) -> list[dict]:
    """Of each rank what :func:`end` says.

    Args:
        call: vLLM's ``collective_rpc``. generate: makes the engine decode. first, steps: from :func:`window`.
    """
    call(begin, args=(first, steps))
    generate()
    return call(end, args=(steps,))

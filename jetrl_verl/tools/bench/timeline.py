# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A chain of kernels one by one: where a step that repeats spends its time, on the profiler's clock.

Events around a graph time it as a whole. CUPTI, which `torch.profiler` brings, knows when every kernel of a replay
began and ended. With programmatic dependent launch a kernel begins under the one in front of it, so its duration alone
says little: what it adds to the chain is the time from the end of that kernel to its own end.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jetrl_verl.tools.bench import BenchError


class Kernel(NamedTuple):
    """One run. Times in us, on a clock of the profiler's."""

    name: str
    begin: float
    end: float


class Step(NamedTuple):
    """Medians, us, of what stands in one place of every period. ``gap``: from the end of the kernel in front to the
    begin of this one, below zero where they overlap. ``adds``: from the one's end to the other's."""

    name: str
    duration: float
    gap: float
    adds: float


class Share(NamedTuple):
    """Medians over the spans, of all kernels of one name: how many there are in a span, and their durations in us."""

    name: str
    count: float
    us: float


def kernels_of(replay: Callable[[], object], times: int = 5) -> list[Kernel]:
    """The kernels of ``times`` replays on this GPU, by their begin."""
    replay()
    return recorded(lambda: [replay() for _ in range(times)])


def recorded(work: Callable[[], object]) -> list[Kernel]:
    """What this GPU does in ``work``, copies and fills included, by its begin."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    return kernels_in(trace)


def kernels_in(trace: profile) -> list[Kernel]:
    """What a recording that has ended holds of this GPU, copies and fills included, by its begin."""
    found = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    return sorted(
        (Kernel(e.name, e.time_range.start, e.time_range.end) for e in found), key=lambda kernel: kernel.begin
    )


def steps_of(kernels: Sequence[Kernel], period: int) -> list[Step]:
    """What each of ``period`` kernels takes that come again and again; the first period, in front of which nothing ran,
    is left out.

    Raises:
        BenchError: the kernels are not two or more whole periods of the same names.
    """
    if len(kernels) < 2 * period or len(kernels) % period:
        raise BenchError(f"{len(kernels)} kernels are not two or more whole periods of {period}: see what else runs.")
    steps = []
    for place in range(period):
        at = range(period + place, len(kernels), period)
        names = {kernels[i].name for i in at}
        if len(names) != 1:
            raise BenchError(f"Different kernels stand at place {place} of {period}: {', '.join(sorted(names))}.")
        durations = [kernels[i].end - kernels[i].begin for i in at]
        gaps = [kernels[i].begin - kernels[i - 1].end for i in at]
        adds = [kernels[i].end - kernels[i - 1].end for i in at]
        steps.append(Step(names.pop(), median(durations), median(gaps), median(adds)))
    return steps


def spans_of(kernels: Sequence[Kernel], is_marker: Callable[[str], bool]) -> list[list[Kernel]]:
    """The kernels from each first marker to the next, which ends a span; what runs between two spans is left out.
    Markers stand at both ends of a span.

    Raises:
        BenchError: no marker, or a span without an end.
    """
    at = [place for place, kernel in enumerate(kernels) if is_marker(kernel.name)]
    if not at or len(at) % 2:
        raise BenchError(f"{len(at)} markers do not make spans: the work did not run, or was cut off.")
    return [list(kernels[first : last + 1]) for first, last in zip(at[::2], at[1::2], strict=True)]


def shares_of(spans: Sequence[Sequence[Kernel]]) -> list[Share]:
    """What each name takes of a span, in the order in which they first come."""
    names = list(dict.fromkeys(kernel.name for span in spans for kernel in span))
    durations = {name: [[k.end - k.begin for k in span if k.name == name] for span in spans] for name in names}
    return [Share(name, median(map(len, found)), median(map(sum, found))) for name, found in durations.items()]

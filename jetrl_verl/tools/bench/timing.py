# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Microseconds of calls on a GPU: cold single runs of several contenders in turns, and sustained runs of one.

What had to be right for the figures to mean something:

* **Turns.** Clock and temperature drift within seconds, so every contender has one run in each round.
* **Cold.** The L2 must hold other data. Flushing it by a write leaves dirty lines that the timed call then carries to
  memory; so nothing is flushed, and a contender goes round among so many sets of buffers of its own that three times
  the L2 has passed before a set is used again (:meth:`Timer.rotated`).
* **No host in it.** A call is captured as a CUDA graph where it can be, and before each run a kernel that only counts
  cycles keeps the GPU busy until the host has enqueued event, run and event; else a run of 10 us shows the host's pace.
* **Sustained.** A large product reaches the power limit within seconds and slows by a tenth or more; the second half of
  some twenty seconds of back-to-back runs is what a training step sees.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

Call = Callable[[], object]

GRAPH_HOLD_US, CALL_HOLD_US = 100, 3000
"""How long the GPU is kept busy before a run: what the host takes to enqueue a graph, or the calls of a whole layer."""

CYCLES_PER_US = 1980
"""Of the highest clock of an H100 or H200; a lower clock holds longer."""

CHUNK_US = 50_000
"""Length of the pieces of a sustained run."""


class Event(Protocol):
    """``torch.cuda.Event``, as far as it is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float: ...


class Clock(Protocol):
    """What keeps time: a GPU, or a stand-in of the tests."""

    def event(self) -> Event: ...

    def synchronize(self) -> None: ...

    def seconds(self) -> float: ...

    def hold(self, microseconds: int) -> None: ...

    def capture(self, call: Call) -> Call: ...


class CudaClock:
    """The current CUDA device."""

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self) -> float:
        """Of the host."""
        return time.monotonic()

    def hold(self, microseconds: int) -> None:
        """Keep the GPU busy, without touching memory, while the host enqueues what is timed."""
        torch.cuda._sleep(CYCLES_PER_US * microseconds)

    def capture(self, call: Call) -> Call:
        """The replay of ``call`` as a CUDA graph; RuntimeError where it cannot be captured.

        What the call allocates lives in the graph's own memory, as long as the replay does.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles, and lets libraries allocate their workspaces outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class Spread(NamedTuple):
    """Microseconds: the median, and what a tenth of the runs stayed below and a tenth exceeded."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Spread":
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


class Timer:
    """Times contenders.

    Args:
        clock: of the device. repeats: rounds of :meth:`interleaved`. l2_bytes: size of the L2 cache.

    Attributes:
        not_captured: names of contenders that no CUDA graph could hold; their host time may show.
    """

    def __init__(self, clock: Clock, repeats: int, l2_bytes: int):
        self.clock = clock
        self.repeats = repeats
        self.l2_bytes = l2_bytes
        self.not_captured: set[str] = set()

    def rotated(self, make: Callable[[], Call], bytes_touched: float) -> list[Call]:
        """As many calls, each on buffers of its own, as put three times the L2 between two uses of one.

        Args:
            make: makes a call on fresh buffers. bytes_touched: by one call, from below.
        """
        return [make() for _ in range(1 + math.ceil(3 * self.l2_bytes / bytes_touched))]

    def captured(self, name: str, calls: Sequence[Call]) -> list[Call]:
        """``calls`` as CUDA graphs; as they are where that fails, which :attr:`not_captured` keeps."""
        try:
            return [self.clock.capture(call) for call in calls]
        except RuntimeError:
            self.not_captured.add(name)
            return list(calls)

    def interleaved(self, contenders: Mapping[str, Sequence[Call]], graphs: bool = True) -> dict[str, Spread]:
        """Single runs of every contender in turns, in a new random order for every round: runs of some milliseconds
        leave the GPU with a clock that the next one starts with, so nobody may always come behind the same one.

        Args:
            contenders: name -> its calls, which take turns as well (:meth:`rotated`).
            graphs: whether to capture each call as a CUDA graph.
        """
        holds = dict.fromkeys(contenders, CALL_HOLD_US)
        if graphs:
            contenders = {name: self.captured(name, calls) for name, calls in contenders.items()}
            holds = {name: CALL_HOLD_US if name in self.not_captured else GRAPH_HOLD_US for name in contenders}
        for calls in contenders.values():
            for call in calls:
                call()
        runs = {name: [(self.clock.event(), self.clock.event()) for _ in range(self.repeats)] for name in contenders}
        order = random.Random(0)
        for turn in range(self.repeats):
            for name in order.sample(list(contenders), len(contenders)):
                calls = contenders[name]
                start, end = runs[name][turn]
                self.clock.hold(holds[name])
                start.record()
                calls[turn % len(calls)]()
                end.record()
        self.clock.synchronize()
        return {
            name: Spread.of([1000 * start.elapsed_time(end) for start, end in pairs]) for name, pairs in runs.items()
        }

    def sustained(self, calls: Sequence[Call], seconds: float) -> Spread:
        """Back-to-back runs for ``seconds``; of the pieces of the second half, microseconds per call."""
        for call in calls:
            call()
        self.clock.synchronize()
        count, begin, pieces = 1, self.clock.seconds(), []
        while not pieces or self.clock.seconds() - begin < seconds:
            start, end = self.clock.event(), self.clock.event()
            start.record()
            for turn in range(count):
                calls[turn % len(calls)]()
            end.record()
            end.synchronize()
            pieces.append(1000 * start.elapsed_time(end) / count)
            count = max(1, round(CHUNK_US / pieces[-1]))
        return Spread.of(pieces[len(pieces) // 2 :])


def copy_bandwidth(timer: Timer, device: torch.device, elements: int = 1 << 28) -> float:
    """Bytes per second, read plus written, of an elementwise kernel over 1 GiB.

    Not ``copy_``: inside a graph that is the copy engine's, which is slower than the multiprocessors (2.76 TB/s against
    4.2 on an H200).
    """
    source = torch.empty(elements, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    times = timer.interleaved({"copy": [lambda: torch.bitwise_not(source, out=target)]})
    return 2 * source.nbytes / (times["copy"].median * 1e-6)

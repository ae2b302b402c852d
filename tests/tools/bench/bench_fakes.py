# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A clock that only the calls under test move, and the machine that it times: for tests of `jetrl bench` on the CPU."""

from collections.abc import Callable

import torch

from jetrl_verl.tools.bench.machine import Machine
from jetrl_verl.tools.bench.timing import Timer


class FakeEvent:
    def __init__(self, clock: "FakeClock"):
        self.clock = clock
        self.at = None

    def record(self) -> None:
        self.at = self.clock.us

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at - self.at) / 1000


class FakeClock:
    """Attributes:
    us: the time. log: names of the calls that were timed or warmed up. holds: microseconds of every hold.
    """

    def __init__(self, can_capture: bool = True):
        self.us = 0.0
        self.log: list[str] = []
        self.holds: list[int] = []
        self.can_capture = can_capture
        self.captures = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def synchronize(self) -> None:
        pass

    def seconds(self) -> float:
        return self.us / 1e6

    def hold(self, microseconds: int) -> None:
        self.holds.append(microseconds)
        self.us += microseconds

    def capture(self, call: Callable) -> Callable:
        if not self.can_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        return call

    def call(self, name: str, *microseconds: float) -> Callable[[], None]:
        """A call that takes these times one after the other, the last for ever."""
        left = list(microseconds)

        def run() -> None:
            self.log.append(name)
            self.us += left.pop(0) if len(left) > 1 else left[0]

        return run


class TickingClock(FakeClock):
    """Every event is one microsecond after the one before, whatever ran: for commands whose calls are real."""

    def event(self) -> FakeEvent:
        clock = self

        class Tick(FakeEvent):
            def record(self) -> None:
                clock.us += 1
                super().record()

        return Tick(self)


def fake_machine(repeats: int = 3) -> Machine:
    return Machine(torch.device("cpu"), Timer(TickingClock(), repeats, l2_bytes=1 << 16), 4e12, 1.5)

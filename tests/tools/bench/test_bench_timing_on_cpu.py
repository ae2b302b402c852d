# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The timer, with a clock that only the calls move: turns, rotation, holds, medians, sustained runs."""

import pytest
import torch
from bench_fakes import FakeClock

from jetrl_verl.tools.bench.timing import CALL_HOLD_US, CHUNK_US, GRAPH_HOLD_US, Spread, Timer, copy_bandwidth


def timer_of(clock, repeats=4, l2_bytes=60 << 20):
    return Timer(clock, repeats, l2_bytes)


def test_every_round_has_one_run_of_each_contender_in_an_order_of_its_own():
    clock, names = FakeClock(), ["a", "b", "c", "d"]
    times = timer_of(clock, repeats=20).interleaved({name: [clock.call(name, ord(name) * 1.0)] for name in names})
    assert clock.log[:4] == names  # each once before anything is timed
    rounds = [clock.log[at : at + 4] for at in range(4, 84, 4)]
    assert len(clock.log) == 84 and all(sorted(each) == names for each in rounds)
    assert len({pair for each in rounds for pair in zip(each, each[1:])}) == 12  # all came behind all others
    assert times["b"] == Spread(98.0, 98.0, 98.0)


def test_only_what_lies_between_the_events_counts():
    clock = FakeClock()
    times = timer_of(clock).interleaved({"a": [clock.call("a", 5.0)]})
    assert clock.holds == 4 * [GRAPH_HOLD_US] and times["a"].high == pytest.approx(5.0)


def test_a_contender_goes_round_among_its_buffers():
    clock = FakeClock()
    timer_of(clock, repeats=5).interleaved({"a": [clock.call(f"a{i}", 1.0) for i in range(3)]})
    assert clock.log == ["a0", "a1", "a2"] + ["a0", "a1", "a2", "a0", "a1"]


@pytest.mark.parametrize(("bytes_touched", "sets"), [(17 << 20, 12), (60 << 20, 4), (180 << 20, 2), (1 << 34, 2)])
def test_three_times_the_l2_passes_before_a_buffer_is_used_again(bytes_touched, sets):
    timer, made = timer_of(FakeClock()), []
    calls = timer.rotated(lambda: made.append(len(made)) or made[-1], bytes_touched)
    assert len(calls) == len(set(made)) == sets
    assert (sets - 1) * bytes_touched >= 3 * timer.l2_bytes


def test_median_and_spread_withstand_an_outlier():
    clock = FakeClock()
    times = timer_of(clock, repeats=10).interleaved({"a": [clock.call("a", 0.0, 3.0, 900.0, 4.0)]})
    assert times["a"] == Spread(4.0, 4.0, 4.0)
    spread = Spread.of([float(i) for i in range(11)])
    assert spread == Spread(5.0, 1.0, 9.0)


def test_what_no_graph_can_hold_runs_as_it_is_with_a_longer_hold_and_is_named():
    clock = FakeClock(can_capture=False)
    timer = timer_of(clock)
    assert timer.interleaved({"a": [clock.call("a", 2.0)]})["a"].median == 2.0
    assert timer.not_captured == {"a"} and set(clock.holds) == {CALL_HOLD_US}


def test_without_graphs_nothing_is_captured():
    clock = FakeClock()
    timer = timer_of(clock)
    timer.interleaved({"a": [clock.call("a", 2.0)]}, graphs=False)
    assert clock.captures == 0 and not timer.not_captured and set(clock.holds) == {CALL_HOLD_US}


def test_a_sustained_run_lasts_as_long_as_asked_and_reports_its_slower_second_half():
    clock = FakeClock()
    begin_slow = 10_000

    def throttled():
        clock.log.append("a")
        clock.us += 100.0 if len(clock.log) < begin_slow else 125.0

    spread = timer_of(clock).sustained([throttled], seconds=20)
    assert spread.median == pytest.approx(125.0)
    assert 20e6 <= clock.us <= 20e6 + 2 * CHUNK_US


def test_a_sustained_run_of_no_seconds_still_has_one_piece():
    clock = FakeClock()
    assert timer_of(clock).sustained([clock.call("a", 30.0)], seconds=0).median == 30.0


def test_copy_bandwidth_counts_bytes_read_and_written():
    class Fixed(FakeClock):
        def capture(self, call):
            return lambda: (call(), setattr(self, "us", self.us + 2.0))

    assert copy_bandwidth(timer_of(Fixed()), torch.device("cpu"), elements=1000) == pytest.approx(8000 / 2e-6)

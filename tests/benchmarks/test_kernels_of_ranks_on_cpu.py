# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernels_of_ranks.py: which steps are recorded, and what is said of them."""

from types import SimpleNamespace

import pytest

from benchmarks import kernels_of_ranks
from benchmarks.engine_over_ranks import show_kernels
from benchmarks.kernels_of_ranks import (
    HOST,
    STEPS,
    TOKENS,
    begin,
    boundary,
    busy_us,
    end,
    record,
    summary,
    window,
)
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.timeline import Kernel


def steps(count: int, waits: float = 0.0) -> list[Kernel]:
    """Of 100 us each and what the GPU waits: two products with a reduction under the second one's end, and a draw."""
    found = []
    for step in range(count):
        at = step * (100.0 + waits)
        found += [Kernel("product", at, at + 30), Kernel("product", at + 30, at + 60)]
        found += [Kernel("reduction", at + 50, at + 80), Kernel("draw", at + 90, at + 100)]
    return found


@pytest.mark.parametrize("waits", [0.0, 40.0])
def test_a_steps_time_is_what_its_kernels_take_and_what_the_gpu_waits(waits):
    found = summary(steps(20, waits), 20)
    assert found["step_us"] == pytest.approx(100 + waits) and found["busy_us"] == pytest.approx(90)
    shares = {share["name"]: (share["count"], share["us"]) for share in found["shares"]}
    assert shares == {"product": (2, 60.0), "reduction": (1, 30.0), "draw": (1, 10.0)}
    assert found["waits"] == pytest.approx({"draw": 10.0, "product": waits, "reduction": 0.0})
    assert next(iter(found["waits"])) == ("product" if waits else "draw"), "the longest wait first"


def test_steps_are_told_by_the_last_kernel_that_each_runs_once():
    made = steps(20)
    assert boundary(made, 20) == "draw"
    prefill = [Kernel("prefill", -50.0, -10.0)]
    assert summary([*prefill, *made], 20) == summary(made, 20), "what is at either end is left out"
    with pytest.raises(BenchError, match="once in each of 7 steps"):
        boundary(made, 7)
    with pytest.raises(BenchError, match="9 steps are too few"):
        summary(steps(9), 9)
    assert summary(steps(10), 10)["step_us"] == 100


def test_kernels_that_overlap_are_busy_once():
    assert busy_us([Kernel("a", 0, 10), Kernel("b", 2, 5), Kernel("c", 8, 12), Kernel("d", 20, 21)]) == 13


def test_the_recording_stands_at_the_end_of_a_response_while_all_requests_are_alive():
    tokens, first, count = window(4096)
    assert (tokens, count) == (TOKENS, STEPS) and tokens > first + count > tokens - 8
    assert summary(steps(count), count)["step_us"] == 100
    tokens, first, count = window(24)
    assert tokens == 24 and first > 0 and first + count < 24


@pytest.fixture
def worker():
    seen = []
    made = SimpleNamespace(seen=seen)
    made.execute_model, made.sample_tokens = lambda step: seen.append(step), lambda step: step
    return made


def engine(worker, asked: int):
    """vLLM's ``collective_rpc`` of one worker, and what makes it work."""

    def call(function, args):
        return [function(worker, *args)]

    return call, lambda: [(worker.execute_model(step), worker.sample_tokens(step)) for step in range(asked)]


def test_a_worker_makes_its_steps_and_is_left_as_it_was(worker):
    stock = worker.execute_model, worker.sample_tokens
    call, generate = engine(worker, 24)
    (found,) = record(call, generate, 12, 8)
    assert worker.seen == list(range(24)) and (worker.execute_model, worker.sample_tokens) == stock
    assert found["host_us"] > 0 and "shares" not in found, "no GPU, no kernels"
    assert tuple(found["host_parts_us"]) == HOST and all(us > 0 for us in found["host_parts_us"].values())
    assert tuple(found["on_core_us"]) == HOST and all(us >= 0 for us in found["on_core_us"].values())
    (again,) = record(call, generate, 12, 8)
    assert again.keys() == found.keys()


def test_the_hosts_time_is_of_the_steps_in_front_of_the_recording(worker, monkeypatch):
    now, ran = [0], [0]
    clocks = SimpleNamespace(perf_counter_ns=lambda: now[0], thread_time_ns=lambda: ran[0])
    monkeypatch.setattr(kernels_of_ranks, "time", clocks)

    def takes(us: int, sleeps: int = 0) -> None:
        now[0] += 1000 * (us + sleeps)
        ran[0] += 1000 * us

    # Each step has another time, so another step, or one more or fewer, is seen.
    worker.execute_model = lambda step: takes(2**step, sleeps=10**3)
    worker.sample_tokens = lambda step: takes(3 * 2**step, sleeps=10**2)

    def generate():
        for step in range(1, 15):
            takes(10 + 5 * 2**step)
            worker.execute_model(step)
            takes(1)
            worker.sample_tokens(step)

    (found,) = record(lambda function, args: [function(worker, *args)], generate, 9, 4)
    recorded = sum(2**step for step in (5, 6, 7, 8))
    assert found["host_parts_us"] == pytest.approx(
        {
            # The wait in front of a step's first call belongs to the step that has ended.
            "engine": 11 + 5 * 2 * recorded / 4,
            "execute_model": 1000 + recorded / 4,
            "sample_tokens": 100 + 3 * recorded / 4,
        }
    )
    assert found["on_core_us"] == pytest.approx(
        {"engine": 11 + 5 * 2 * recorded / 4, "execute_model": recorded / 4, "sample_tokens": 3 * recorded / 4}
    )


def test_too_few_steps_are_no_recording(worker):
    call, generate = engine(worker, 15)
    with pytest.raises(BenchError, match="made 15 steps"):
        record(call, generate, 12, 8)
    begin(worker, 1, 2)
    with pytest.raises(BenchError, match="made 0 steps"):
        end(worker, 2)


def test_the_output_has_each_rank_and_the_kernels_of_the_first(capsys):
    host, ran = (dict(zip(HOST, us, strict=True)) for us in ((20.0, 60.0, 25.0), (19.0, 50.0, 24.0)))
    of_host = {"host_us": 101.0, "host_parts_us": host}
    ranks = [of_host | summary(steps(20), 20), of_host | {"on_core_us": ran} | summary(steps(20, 25.0), 20)]
    show_kernels({"model": "qwen3_8b", "tp": 2, "row": "jet_fp8", "ranks": ranks})
    said = capsys.readouterr().out
    for rank, (us, waits) in enumerate(
        ((100, "10 us, in front of all runs of draw"), (125, "25 us, in front of all runs of product"))
    ):
        assert (
            f"qwen3_8b, TP 2, jet_fp8, rank {rank}: a step {us} us, the GPU busy 90 us, most of the rest, {waits}"
            in said
        )
    assert said.count("of its worker's host, not recorded, us: engine 20, execute_model 60, sample_tokens 25") == 2
    assert said.count("sample_tokens 25; its thread ran 74 of the two calls\n") == 1
    assert said.count("reduction") == 1
    show_kernels({"model": "qwen3_8b", "tp": 1, "row": "bf16", "ranks": [{"host_us": 3.0}]})
    show_kernels({"model": "qwen3_8b", "tp": 1, "row": "bf16"})
    assert not capsys.readouterr().out

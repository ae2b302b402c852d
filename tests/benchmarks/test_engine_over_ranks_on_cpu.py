# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/engine_over_ranks.py: an engine has the arguments of its job in verl, and GPUs that no other one has."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks import engine_over_ranks
from benchmarks.engine_alone import engine_arguments, load
from benchmarks.engine_over_ranks import Job, batches, crowded, main
from jetrl_verl.tools.rows import Row

BF16, JET = Row("bf16"), Row("jet_fp8")


def test_engines_of_one_size_run_side_by_side_on_gpus_of_their_own(tmp_path):
    every = [(row, tp) for tp in (2, 1, 4) for row in (BF16, JET)]
    found = batches(every, gpus=4, alone=False, in_turn=False)
    assert found == [[(BF16, 1), (JET, 1)], [(BF16, 2), (JET, 2)], [(BF16, 4)], [(JET, 4)]]
    assert [len(batch) for batch in batches(every, gpus=4, alone=True, in_turn=False)] == [1] * 6
    job = Job(tmp_path, "qwen3_8b", 2048, 64, 0.6)
    for batch in found:
        taken = [job.planned(*each, place, "4567").command[1] for place, each in enumerate(batch)]
        gpus = [gpu for words in taken for gpu in words.removeprefix("CUDA_VISIBLE_DEVICES=").split(",")]
        assert len(set(gpus)) == len(gpus) == sum(tp for _, tp in batch) and set(gpus) <= set("4567")
    names = {json.dumps(job.name(*each)) for each in every}
    assert len(names) == len({job.paths(*each).folder for each in every}) == len(every)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_has_the_arguments_of_its_job(tmp_path, monkeypatch, tp):
    asked = []

    def stand_in(config, log, environment, steps, ends, kernels, turn):
        assert turn is None
        asked.append((config, steps))
        return 0, [{"step": 2, "tokens_per_s": 300.0}, *([{"ranks": [{"host_us": 9.0}] * tp}] if kernels else [])]

    monkeypatch.setattr(engine_over_ranks, "timed_steps", stand_in)
    job = Job(tmp_path, "qwen3_4b", 24, 8, 0.3, tiny=True)
    found = job.take(JET, tp)
    assert (found["status"], found["tokens_per_s"], found["tokens_per_s_and_gpu"]) == (0, 300.0, 300.0 / tp)
    recorded = replace(job, kernels=True)
    assert recorded.take(JET, tp) | {"seconds": 0} == found | {"seconds": 0, "ranks": [{"host_us": 9.0}] * tp}
    assert "--kernels" in recorded.planned(JET, tp, 0, "01").command
    (config, steps), _ = asked
    assert steps == engine_over_ranks.STEPS
    arguments = engine_arguments(load(config))
    assert (arguments.tensor_parallel_size, arguments.quantization) == (tp, "jetrl_fp8")
    assert (arguments.max_num_seqs, arguments.load_format) == (8, "dummy")


def test_engines_in_turn_share_gpus_and_have_the_cache_of_their_batch(tmp_path, monkeypatch):
    every = [(row, tp) for tp in (2, 4) for row in (BF16, JET, Row("fp8_rollout"))]
    found = batches(every, gpus=4, alone=False, in_turn=True)
    assert [{tp for _, tp in batch} for batch in found] == [{2}, {4}] and sum(map(len, found)) == len(every)
    job = Job(tmp_path, "qwen3_8b", 2048, 64, 0.6, in_turn=True)
    gpus = [[job.planned(*each, place, "4567").command[1][-3:] for place, each in enumerate(batch)] for batch in found]
    assert gpus == [["4,5", "6,7", "4,5"], ["6,7"] * 3]
    assert "--in-turn" in job.planned(JET, 2, 0, "01").command
    turns = []
    monkeypatch.setattr(
        engine_over_ranks, "timed_steps", lambda config, *rest: turns.append((config, rest[-1])) or (0, [])
    )
    small = Job(tmp_path, "qwen3_4b", 24, 8, 0.3, tiny=True, in_turn=True)
    small.take(JET, 2)
    [(config, turn)] = turns
    assert turn == tmp_path / "turn.lock"
    arguments = engine_arguments(load(config))
    tokens = 8 * (512 + 24)
    of_a_token = 2 * 36 * 8 * 128 * 2  # keys and values of 36 layers, 8 heads of 128 in BF16
    assert 1.0 < arguments.kv_cache_memory_bytes * 2 / (tokens * of_a_token) < 1.1
    assert arguments.gpu_memory_utilization == 0.05


def test_engines_in_turn_that_do_not_fit_together_do_not_begin(tmp_path):
    """67.1 GiB were in use of an H100 on which two 8B engines of 8-bit weights, TP 1, waited for their turns."""
    job = Job(tmp_path, "qwen3_8b", 2048, 64, 0.6, in_turn=True)
    two = [(Row("fp8_rollout"), 1), (JET, 1)]
    assert 67 < sum(job.gib(*each) for each in two) < 71
    assert not crowded(job, two, gpus=1, gib=71)
    assert not crowded(job, [*two, (BF16, 1)], gpus=2, gib=76), "the third one has the other half of a GPU's pair"
    assert "Set fewer --rows" in crowded(job, [*two, (BF16, 1)], gpus=1, gib=78)
    assert crowded(job, [(BF16, 4)] * 5, gpus=4, gib=50) and not crowded(job, [(BF16, 4)] * 3, gpus=4, gib=50)


@pytest.mark.parametrize(("status", "rates"), [(1, []), (0, []), (124, [{"tokens_per_s": 1.0}])])
def test_an_engine_that_fails_or_says_nothing_is_a_failure(tmp_path, monkeypatch, status, rates):
    job = Job(tmp_path, "qwen3_4b", 24, 8, 0.3, tiny=True, ends=math.inf)
    monkeypatch.setattr(Job, "compose", lambda self, row, tp: tmp_path / "config.yaml")
    monkeypatch.setattr(engine_over_ranks, "timed_steps", lambda *_: (status, rates))
    found = job.take(BF16, 1)
    assert found["status"] == (status or 1) and found["errors"] == []
    assert found.get("tokens_per_s") == (rates[0]["tokens_per_s"] if rates else None), "a recording may fail behind it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tiny --rows int9", "int9"),
        ("--tiny --sequences 6", "Set a multiple of 4"),
        ("--gpus 64 --tp 1", "GPUs of this machine"),
        ("--tiny --gpus 2 --tp 4", "--tp 4 is not supported with --gpus 2"),
        ("--model qwen2_5_7b --gpus 8 --tp 8", "--tp 8 is not supported with qwen2_5_7b"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        main([str(tmp_path), *words.split()])
    assert said in capsys.readouterr().err

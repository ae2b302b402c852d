# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl accepts the jobs of steps.py and engine_alone.py; what steps.py compares."""

from dataclasses import replace

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks import engine_alone, steps
from benchmarks.published_shapes import PUBLISHED, tiny, write_model
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.rows import parse_row


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny(PUBLISHED["qwen3_1_7b"], ranks=2), folder)
    return folder


def accepted(job, row, model, folder, **options):
    """The configuration that verl composes for a row, after its own checks."""
    return composed(steps.words_of(job, parse_row(row, steps.ROWS), model, folder, RunPaths(folder), **options))


def composed(words):
    """The configuration that verl composes of ``words``, after its own checks."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    validate_config(config, need_reference_policy(config), use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return config


@pytest.mark.parametrize("row", [*steps.ROWS, "jet_fp8+jetrl.kv_cache=fp8", "fp8_rollout+jetrl.kv_cache=fp8"])
def test_verl_accepts_every_row(row, model, tmp_path):
    config = accepted(steps.JOBS["3b"], row, model, tmp_path)
    correction = config.algorithm.rollout_correction.rollout_is
    assert correction == ("token" if row.startswith(("fp8_rollout", "verl_fp8")) else None)
    assert config.actor_rollout_ref.model.use_liger == (row.partition("+")[0] in steps.STOCK)


@pytest.mark.parametrize("name", steps.JOBS)
def test_verl_accepts_every_job(name, model, tmp_path):
    job = steps.JOBS[name]
    config = accepted(job, "jet_fp8", model, tmp_path)
    prompts = job.updates * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert 4 * prompts == 4 * config.data.train_batch_size == job.sequences
    assert not config.actor_rollout_ref.rollout.ignore_eos and job.steps - job.timed == 2


def test_a_timeline_traces_one_step_after_the_timed_ones(model, tmp_path):
    config = accepted(steps.JOBS["3b"], "bf16_best", model, tmp_path, timeline=True)
    assert config.global_profiler.steps == [config.trainer.total_training_steps] == [steps.JOBS["3b"].steps + 1]
    assert config.actor_rollout_ref.actor.profiler.tool == "torch"


def test_the_engine_alone_has_the_arguments_of_the_run(model, tmp_path, cpu_platform):
    job = replace(steps.JOBS["3b"], sequences=8, gpus=1, tp=1, ulysses=1)
    arguments = engine_alone.engine_arguments(accepted(job, "jet_fp8", model, tmp_path, tiny=True))
    assert arguments.model == str(model) and arguments.max_num_seqs == 8 and arguments.load_format == "dummy"


def record(row: str, seconds: float, **changed) -> dict:
    same = {"job": "3b", "tiny": False, "host": "a", "began": 0.0, "ended": 500.0, "complete": True}
    return {**same, "row": row, "seconds": {"step": [seconds] * 4}, "build": {"gpu": "NVIDIA H100"}, **changed}


@pytest.mark.parametrize(
    "changed", [{"host": "b"}, {"job": "8b"}, {"complete": False}, {"build": {"gpu": "NVIDIA H200"}}, {"ended": 2300.0}]
)
def test_rows_of_other_bookings_are_not_compared(changed):
    best, jet = record("bf16_best", 24.0), record("jet_fp8", 20.0, began=600.0, ended=1100.0)
    assert steps.ratio(jet, [best, jet], ["bf16_best"]) == 1.2
    assert steps.ratio({**jet, **changed}, [best], ["bf16_best"]) is None


def test_the_fastest_rival_is_the_baseline():
    rivals = [record("fp8_rollout", 30.0), record("fp8_rollout+jetrl.kv_cache=fp8", 26.0)]
    jet = record("jet_fp8", 20.0)
    assert steps.ratio(jet, [*rivals, jet], steps.BASELINES["FP8 rollout"]) == 1.3


def test_a_row_that_was_taken_again_replaces_an_incomplete_one():
    failed, again, other = record("jet_fp8", 20.0, complete=False), record("jet_fp8", 21.0), record("verl_fp8", 22.0)
    assert steps.kept([failed, other, again, again]) == [other, again, again]
    assert steps.kept([again, failed]) == [again, failed]


def test_a_line_that_a_machines_end_has_cut_is_named_and_left_out(tmp_path, capsys):
    file, rows = tmp_path / "steps.jsonl", [record("bf16_best", 24.0), record("jet_fp8", 20.0)]
    steps.append(file, rows[0])
    with file.open("a") as lines:
        lines.write('{"job": "3b", "row": "jet')
    steps.append(file, rows[1])
    assert steps.read(file) == rows and "line 2 of" in capsys.readouterr().out


def test_the_first_steps_and_those_without_a_gradient_are_left_out():
    logged = {"response_length/mean": 12.0, "response_length/clip_ratio": 0.25, "rollout_corr/k3_kl": 0.0}
    norms = (1.0, 1.0, None, 1.0, 1.0)
    records = [(n, {**logged, "actor/grad_norm": norm, "timing_s/step": n}) for n, norm in enumerate(norms)]
    result = steps.figures(records, steps.JOBS["3b"])
    assert result["timed"] == 2 and result["seconds"]["step"] == [3, 4] and result["k3_kl"] == 0.0

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl accepts the jobs of verl_step.py, exact_over_ranks.py and engine_alone.py; what makes a run exact."""

import argparse

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks import engine_alone, exact_over_ranks, verl_step
from benchmarks.published_shapes import PUBLISHED, tiny, write_model
from benchmarks.verl_runs import MISMATCH, NOT_FINITE, Results
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.rows import parse_row


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny(PUBLISHED["qwen3_1_7b"], ranks=2), folder)
    return folder


def accepted(words: list[str]):
    """The configuration that verl composes of ``words``, after its own checks."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    validate_config(config, need_reference_policy(config), use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return config


def step_options(**changed) -> argparse.Namespace:
    sizes = dict(model="qwen3_1_7b", response=24, sequences=8, steps=2, memory=0.45, gpus=1, tp=1, tiny=True, set=[])
    return argparse.Namespace(**{**sizes, **changed})


@pytest.mark.parametrize("row", verl_step.ROWS)
def test_verl_accepts_every_row_of_a_step(row, model, tmp_path):
    row = parse_row(row, verl_step.ROWS, "a row")
    words = verl_step.words_of(row, step_options(tiny=False), model, tmp_path, RunPaths(tmp_path))
    config = accepted(words)
    assert config.data.max_response_length == 24 and config.actor_rollout_ref.rollout.ignore_eos


@pytest.mark.parametrize("name", exact_over_ranks.CELLS)
def test_verl_accepts_every_cell_over_ranks(name, model, tmp_path):
    job = exact_over_ranks.Job(tmp_path, gpus=2, tp=2, tiny=True)
    config = accepted(job.words(name, "jet_fp8_exact", model, RunPaths(tmp_path)))
    assert config.trainer.n_gpus_per_node == config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


EXACT = {"status": 0, "steps": 3, "moved": 3, "response_length": 2048.0, **dict.fromkeys(MISMATCH, 0.0)}


def test_a_run_without_differences_is_exact():
    assert exact_over_ranks.judged(EXACT, 2048) == {**EXACT, "exact": "yes"}


@pytest.mark.parametrize("name", MISMATCH)
@pytest.mark.parametrize("value", [1e-9, -1e-9, None, NOT_FINITE])
def test_a_difference_or_a_missing_figure_is_not_exact(name, value):
    result = exact_over_ranks.judged({**EXACT, name: value}, 2048)
    assert result["exact"] == "no" and result["status"] == 1 and name in result["errors"][0]


@pytest.mark.parametrize("changed", [{"steps": 2}, {"moved": 2}, {"response_length": 2047.5}, {"status": 1}])
def test_an_incomplete_run_is_not_exact(changed):
    result = exact_over_ranks.judged({**EXACT, **changed}, 2048)
    assert result["exact"] == "no" and result["status"] == 1


def test_the_engine_alone_has_the_arguments_of_the_run(model, tmp_path, cpu_platform):
    row = parse_row("jet_fp8", verl_step.ROWS, "a row")
    config = accepted(verl_step.words_of(row, step_options(), model, tmp_path, RunPaths(tmp_path)))
    arguments = engine_alone.engine_arguments(config)
    assert arguments.model == str(model) and arguments.max_num_seqs == 8 and arguments.load_format == "dummy"


def test_results_are_appended_and_other_settings_refused(tmp_path):
    from rich.console import Console

    file, build = tmp_path / "runs.json", {"gpu": "NVIDIA H200"}
    results = Results(file, ["row"], {"steps": 3}, build)
    assert results.take([({"row": "a"}, lambda: {"status": 0, "steps": 3})], float("inf"), Console(quiet=True)) == 0
    assert Results(file, ["row"], {"steps": 3}, build).done({"row": "a"})
    with pytest.raises(SystemExit, match="steps 3 and not 2"):
        Results(file, ["row"], {"steps": 2}, build)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each run of benchmarks/recipes.py: what its script then says to verl is a job that verl accepts, small ones too."""

import subprocess
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from recipe_cases import RECIPES
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks import recipes

RUNS = [(*run, False) for run in recipes.chosen([])] + [(name, "jet_fp8", True) for name in recipes.RECIPES]


@pytest.mark.parametrize(("name", "precision", "tiny"), RUNS)
def test_every_run_is_a_job_that_verl_accepts(words, tmp_path, name, precision, tiny):
    recipe, job = recipes.RECIPES[name], recipes.Job(tmp_path, tiny)
    settings = {"PRECISION": precision, "GPUS_PER_NODE": "1", "MODEL_PATH": "/remote://policy", **recipe.settings}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words(recipe.script, *job.words(recipe), **settings))
    validate_config(config, need_reference_policy(config), use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert config.trainer.n_gpus_per_node == 1 and config.trainer.total_training_steps == recipes.STEPS
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    length = rollout.prompt_length + rollout.response_length
    assert actor.ppo_max_token_len_per_gpu >= length and rollout.max_num_batched_tokens > 0
    assert rollout.tensor_model_parallel_size == actor.ulysses_sequence_parallel_size == 1
    # Two updates a step, and groups whose answers can differ.
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size and rollout.n > 1
    assert (config.trainer.save_freq > 0) == recipe.saves
    assert config.trainer.test_freq == recipes.STEPS
    if tiny:
        assert not actor.fsdp_config.param_offload and rollout.enforce_eager


def test_without_validation_none_is_asked_for(tmp_path):
    job = recipes.Job(tmp_path, False, validates=False)
    assert "trainer.test_freq=-1" in job.words(recipes.RECIPES["gsm8k"])


def test_a_stage_whose_start_is_missing_is_a_failed_run_and_not_the_end(tmp_path):
    found = recipes.Job(tmp_path, True).take_steps("deepscaler_16k", "bf16")
    assert found == {"status": 1, "errors": ["deepscaler_8k:bf16 has not saved a policy"]}


def test_every_recipe_but_the_demo_and_32b_is_benchmarked():
    scripts = {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/run_*.sh")}
    left_out = {"demo/run_addition.sh", "dapo/run_qwen2_5_32b.sh"}
    assert {recipe.script for recipe in recipes.RECIPES.values()} == scripts - left_out


def test_the_command_line_names_runs_before_and_behind_its_options(tmp_path):
    script = Path(recipes.__file__).with_name("recipes_on_gpu.sh")
    answer = subprocess.run(
        ["bash", str(script), str(tmp_path / "out"), "--tiny", "gsm8k:bf16", "--seconds", "0"],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "gsm8k bf16: not begun, since the benchmark's time was up" in answer.stdout
    answer = subprocess.run(["bash", str(script), str(tmp_path), "gsm9k"], capture_output=True, text=True)
    assert answer.returncode == 2 and "gsm9k is not a recipe here" in answer.stderr

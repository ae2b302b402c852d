# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/recipes.py: verl accepts the job of every recipe."""

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config

from benchmarks import recipes


@pytest.mark.parametrize("shipped", [False, True])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_verl_accepts_the_job_of_every_recipe(words, tmp_path, name, shipped):
    recipe, job = recipes.RECIPES[name], recipes.Job(tmp_path, gpus=8 if shipped else 1, shipped=shipped)
    if shipped and recipe.shipped is None:
        assert "is not supported" in recipes.unfitting(job, [(name, "jet_fp8")])
        return
    settings = {"PRECISION": "jet_fp8", "GPUS_PER_NODE": str(job.gpus), "MODEL_PATH": "/remote://policy"}
    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = words(recipe.script, *job.words(name, "jet_fp8"), **settings, **recipe.settings)
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, need_reference_policy(config), use_critic=False)
    assert recipes.unfitting(job, [(name, "jet_fp8")]) == ""
    assert config.trainer.total_training_steps == recipes.STEPS
    assert config.data.train_batch_size == (1024 if shipped else 2 * config.actor_rollout_ref.actor.ppo_mini_batch_size)

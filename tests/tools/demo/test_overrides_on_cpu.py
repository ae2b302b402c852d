# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's overrides compose with verl's primary config under every precision."""

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import GROUP_SIZE, build_overrides
from jetrl_verl.tools.launch import RunPaths


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_overrides_compose_with_verl(precision, device, tmp_path):
    folder = tmp_path / "it's a=b, [c]"  # characters that mean something in Hydra's grammar
    prepared = Prepared(folder, {})
    overrides = build_overrides(precision, prepared, RunPaths(folder), device, steps=4)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    assert config.data.val_files == str(prepared.test)
    assert config.actor_rollout_ref.model.path == str(prepared.policy)
    assert config.trainer.total_training_steps == 4
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 1.0
    assert config.get("jetrl", {"precision": "bf16"})["precision"] == precision
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert rollout.n == GROUP_SIZE
    # Two optimizer steps a batch, each in one micro batch.
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size
    assert actor.ppo_micro_batch_size_per_gpu == actor.ppo_mini_batch_size * rollout.n

# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The demo's command line composes with verl's primary config under every precision."""

from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.demo.cache import Prepared
from jetrl_verl.demo.overrides import GROUP_SIZE, RunPaths, build_overrides


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
    # Two optimiser steps a batch, each in one micro batch.
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size
    assert actor.ppo_micro_batch_size_per_gpu == actor.ppo_mini_batch_size * rollout.n


def test_replay_buffer_of_the_demo_polls_faster_than_verls():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.import_utils import load_extern_object

    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = build_overrides("bf16", Prepared(Path("entry"), {}), RunPaths(Path("run")), "cpu", steps=4)
        sampler = compose("ppo_trainer", overrides=overrides).trainer.v1.sampler
    arguments = {
        "trainer_mode": "sync",
        "trainer_config": {},
        "max_off_policy_threshold": sampler.max_off_policy_threshold,
        "max_off_policy_strategy": sampler.max_off_policy_strategy,
        "sampler_kwargs": sampler.sampler_kwargs,
        "refill_fn": None,
    }
    demo = load_extern_object(sampler.custom_sampler.path, sampler.custom_sampler.name)
    assert demo(**arguments).poll_interval == 0.1
    assert ReplayBuffer(**arguments).poll_interval == 2.0  # else the class has outlived its reason

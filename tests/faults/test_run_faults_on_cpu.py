# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs of run_faults.py compose on every device, and its verdicts on how runs ended."""

from dataclasses import replace

import pytest
import run_faults
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from fault_injector import AT_ITS_END, IN_THE_PHASE
from hydra import compose, initialize_config_module
from hydra_files import parsed_once  # noqa: F401  (for every test of this file)
from run_faults import Outcome

from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.launch import RunPaths


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_of_several_ranks_composes_and_its_batches_divide(device, ranks, tmp_path):
    paths, prepared = RunPaths(tmp_path), Prepared(tmp_path, {})
    words = run_faults.job("jet_fp8", prepared, paths, device, ranks, 3, tmp_path / "it's here")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.trainer.default_local_dir == str(tmp_path / "it's here")
    assert config.trainer.n_gpus_per_node == ranks and rollout.tensor_model_parallel_size == min(2, ranks)
    sequences = config.data.train_batch_size * rollout.n
    assert sequences == actor.ppo_mini_batch_size * rollout.n  # one optimizer step a batch
    micro_batches = 2 if device == "cpu" else 16
    assert sequences == ranks * micro_batches * actor.ppo_micro_batch_size_per_gpu
    assert sequences == ranks * rollout.log_prob_micro_batch_size_per_gpu
    assert config.data.max_prompt_length + config.data.max_response_length <= rollout.max_model_len <= 256
    assert (config.ray_kwargs.ray_init.get("num_gpus") == ranks) == (device == "cpu")


KILLED = Outcome("trainer-update", 1, 6.0, 2, 2, ["died"], [], 2, IN_THE_PHASE)
RESUMED = Outcome("resumed", 0, 60.0, 3, 3, [], [], 3)
REFUSED = replace(RESUMED, name="truncated", status=1, first=None, last=None, errors=["x.pt is damaged (...)"])


def test_a_chain_that_resumed_after_its_last_checkpoint_passes():
    chain = [KILLED, REFUSED, RESUMED, replace(RESUMED, name="two-runs-1", first=1, last=2)]
    assert run_faults.faults_of(chain) == run_faults.lost(chain) == []


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (replace(KILLED, status=None), "trainer-update hung"),
        (replace(KILLED, left=["7 ray"]), "trainer-update left 7 ray"),
        (replace(KILLED, killed=AT_ITS_END), "trainer-update: the phase ended before the kill"),
        (replace(KILLED, killed=None), "trainer-update: nothing was killed"),
        (replace(KILLED, status=0), "trainer-update ended as if nothing had happened"),
        (replace(REFUSED, status=0), "truncated ended as if nothing had happened"),
        (replace(REFUSED, errors=["Ray did not start"]), "truncated did not say 'is damaged'"),
        (replace(RESUMED, status=1), "resumed ended with status 1"),
    ],
)
def test_every_fault_of_a_run_is_reported(outcome, sentence):
    assert sentence in run_faults.faults_of([outcome])


def test_a_lost_step_is_reported():
    assert run_faults.lost([KILLED, replace(RESUMED, first=2)]) == [
        "resumed began with step 2 after trainer-update, saved 2"
    ]
    assert run_faults.lost([replace(KILLED, saved=1), replace(RESUMED, first=2)]) == [
        "trainer-update trained 2 steps and saved 1"
    ]

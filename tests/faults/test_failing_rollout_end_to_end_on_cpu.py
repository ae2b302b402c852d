# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Real runs of verl whose rollout fails, or is killed in a weight sync: they end at once, with a sentence about it."""

import pytest
from fault_injector import RAISED, Fault
from run_faults import Chain, faults_of, lost

from jetrl_verl.config.support.table import refusal

SECONDS, SECONDS_OF_A_REFUSAL = 30.0, 10.0
"""From the failure to the end of the driver."""

SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.num_warmup_batches=1",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=jetrl",
    "ray_kwargs.ray_init.num_gpus=2",
)
"""A rollout on a GPU of its own."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("precision", "kind", "error"),
    [
        ("bf16", "raise", RAISED),
        pytest.param("bf16", "kill", "EngineDeadError", marks=pytest.mark.slow),
        pytest.param("jet_fp8", "raise", RAISED, marks=pytest.mark.slow),
        pytest.param("jet_fp8", "kill", "EngineDeadError", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_fails_in_the_first_sync_ends_the_run(precision, kind, error, tmp_path):
    fault = Fault(kind, "rollout", "sync", 0, str(tmp_path))
    outcome = Chain(tmp_path / "runs", precision, 60.0, "cpu", 1).run(kind, 1, fault)
    assert outcome.status == 1 and outcome.seconds < SECONDS and not outcome.left, outcome
    # Verl's own shared memory, still in use, may hide the worker's error from the trainer.
    (log,) = (tmp_path / "runs").rglob("run.log")
    assert outcome.errors and error in log.read_text(), outcome.errors


@pytest.mark.timeout(900)
def test_what_a_worker_refuses_as_it_starts_is_the_last_line(tmp_path):
    fault = Fault("refuse", "rollout", "sync", 0, str(tmp_path))
    outcome = Chain(tmp_path / "runs", "jet_fp8_exact", 60.0, "cpu", 1).run("refusal", 1, fault)
    (log,) = (tmp_path / "runs").rglob("run.log")
    assert outcome.status == 1 and outcome.seconds < SECONDS_OF_A_REFUSAL and not outcome.left, outcome
    assert log.read_text().rstrip().splitlines()[-1] == f"jetrl_verl: {refusal('operation_replaced_in_vllm')}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_around_a_rollout_on_a_gpu_of_its_own_end_with_a_sentence_and_the_run_resumes(tmp_path):
    chain = Chain(tmp_path, "jet_fp8_exact", 120.0, "cpu", 1, SEPARATE)
    kills = [("server", "sync"), ("engine", "update"), ("trainer", "sync")]
    outcomes = [chain.broken(f"{victim}-{phase}", "kill", victim, phase) for victim, phase in kills]
    for outcome in outcomes:
        assert outcome.errors[-1].endswith("resume from the last checkpoint (trainer.resume_mode=auto)."), outcome
    outcomes.append(chain.run("resumed", chain.saved + 1))  # its first sync passes the contract check
    assert faults_of(outcomes) + lost(outcomes) == []

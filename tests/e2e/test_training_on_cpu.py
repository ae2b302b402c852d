# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The main job: verl, Ray and vLLM on a CPU, a few steps, a checkpoint, and a resume from it.

All runs start from the demo's warmed-up policy. A start of verl and vLLM takes one to two minutes on two cores, so the
second run both resumes the first's checkpoint and checks zero mismatch under ``jet_fp8_exact``.
"""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from engines import merge_checkpoint
from jobs import Run, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl_verl.checkpoint.export import ExportOptions, export

STEPS = 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def jet(policy, checkpoints, tmp_path_factory) -> Run:
    return train(
        policy,
        "jet_fp8",
        tmp_path_factory.mktemp("jet_fp8"),
        STEPS,
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={checkpoints}",
    )


@pytest.fixture(scope="module")
def exact(policy, jet, checkpoints, tmp_path_factory) -> Run:
    """As many further steps, with other micro-batches in every phase."""
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    return train(
        policy,
        "jet_fp8_exact",
        tmp_path_factory.mktemp("exact"),
        2 * STEPS,
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
        "actor_rollout_ref.rollout.temperature=0.8",
        # One optimizer step a batch, so every ratio is the first mini-batch's; micro-batches of another size than
        # those of the old log-probabilities.
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.max_num_batched_tokens=256",
        "actor_rollout_ref.rollout.max_num_seqs=48",
    )


PADDED = ("actor_rollout_ref.model.use_remove_padding=False",)
MOMENTS_IN_8_BITS = (
    "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim",
    "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "words"),
    [("qurl_int8", (*PADDED, *MOMENTS_IN_8_BITS)), ("qurl_int8", ()), ("int8_rollout_tis", MOMENTS_IN_8_BITS)],
    ids=["QuRL, padded, moments in 8 bits", "QuRL, packed", "FlashRL, packed, moments in 8 bits"],
)
def test_a_baseline_trains_two_steps(policy, tmp_path, precision, words):
    """An INT8 rollout and importance weights; QuRL's loss or FlashRL's."""
    run = train(policy, precision, tmp_path, 2, *words)
    assert len(run.metrics) == 2 and len({digest for *_, digest in run.syncs}) == 3
    assert {(quantized, plain) for _, quantized, plain, _, _ in run.syncs} == {("14", "11")}
    for step in run.metrics:
        assert step["actor/grad_norm"] > 0 and 0 < step["rollout_corr/k3_kl"] < 0.1
        assert step["actor/jetrl/sync_megabytes"] < 0.3 * step["actor/jetrl/sync_stock_megabytes"]
    # A wrong format, or another layer's scales, would be off by more than a rounding.
    assert run.mean("training/rollout_probs_diff_max") < 0.5


def test_every_sync_passed_the_contract_and_changed_the_rollouts_weights(jet):
    """One sync before the first step and one after each; the digest is of the live parameters."""
    assert len(jet.metrics) == STEPS
    assert len(jet.syncs) == STEPS + 1
    assert {(quantized, plain) for _, quantized, plain, _, _ in jet.syncs} == {("14", "11")}
    assert len({digest for *_, digest in jet.syncs}) == STEPS + 1


def test_sync_and_contract_check_cost_under_one_percent_of_a_step(jet):
    """The trainer's quantization and sums are part of its stream; the rollout's sums are timed separately."""
    checks = [float(check) for _, _, _, check, _ in jet.syncs[1:]]
    assert fmean(checks) + jet.mean("actor/jetrl/sync_seconds") < 0.01 * jet.mean("timing_s/step")


def test_a_sync_sends_a_fraction_of_stock_bytes(jet):
    megabytes, stock = jet.mean("actor/jetrl/sync_megabytes"), jet.mean("actor/jetrl/sync_stock_megabytes")
    assert megabytes < 0.3 * stock


def test_trainer_and_rollout_agree_in_every_bit_at_every_step(exact):
    exact.check_exact(STEPS)
    assert len({step["actor/entropy"] for step in exact.metrics}) == STEPS


def test_training_resumes_from_the_checkpoint(jet, exact):
    """The first sync after the resume sends the weights of the last one before it."""
    assert len(exact.metrics) == STEPS, "as many steps are left after the checkpoint"
    assert exact.syncs[0][-1] == jet.syncs[-1][-1]


def test_the_export_equals_the_rollouts_last_weights(jet, checkpoints, tmp_path):
    (exported,) = export(checkpoints, tmp_path / "fp8", ExportOptions("fp8"))
    assert f"{exported.digest:#018x}" == jet.syncs[-1][-1]


def test_the_merger_writes_a_folder_that_transformers_loads(jet, policy, checkpoints, tmp_path):
    actor = checkpoints / f"global_step_{STEPS}" / "actor"
    merge_checkpoint(actor, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer) == merged.config.vocab_size
    before = load_file(next(Path(policy.policy).glob("*.safetensors")))
    after = merged.state_dict()
    assert before.keys() == after.keys()
    changed = sum((after[name] - before[name].float()).abs().sum().item() for name in before)
    assert 0 < changed < float("inf")
    assert merged(torch.arange(8)[None]).logits.isfinite().all()

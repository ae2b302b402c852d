# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in a real CPU job: trainer and rollout agree in every bit, also after a resume.

The policy is random and hardly ever right, so an entropy bonus gives the steps a gradient.
"""

import math
from pathlib import Path

import pytest
import torch
from engines import merge_checkpoint
from jobs import ACTOR, ROLLOUT, Run, train
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.tools.demo.policy import POLICIES, build_model, build_tokenizer, save_policy

# Sampled by tests/rollout/test_exact_rollout_on_cpu.py and tests/nn/test_experts_on_cpu.py.
pytestmark = pytest.mark.slow

STEPS = 3
QUANTIZED, PLAIN = 2 * (4 + 2), 2 * 5 + 3
"""Per layer q, k, v, o and two expert parameters; four norms and the router, plus three tensors outside the layers."""


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """The untrained policy in the layout of published checkpoints: one tensor per expert and projection."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), build_tokenizer()
    save_policy(build_model(POLICIES["moe"], tokenizer), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def run_until(policy, start, checkpoints, tmp_path_factory):
    """Callable ``steps -> Run``: resumes from the last checkpoint, runs to step ``steps`` and saves it."""

    def until(steps: int) -> Run:
        return train(
            policy,
            "jet_fp8_exact",
            tmp_path_factory.mktemp("exact"),
            steps,
            f"actor_rollout_ref.model.path={start}",
            f"trainer.save_freq={steps}",
            f"trainer.default_local_dir={checkpoints}",
            "trainer.resume_mode=auto",
            f"{ACTOR}.entropy_coeff=0.1",
            # One optimizer step a batch, so every ratio is the first mini-batch's; micro-batches of other sizes than
            # those of the old log-probabilities; a rollout that mixes prompts and single tokens.
            f"{ACTOR}.ppo_mini_batch_size=16",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
            f"{ROLLOUT}.max_num_batched_tokens=256",
            f"{ROLLOUT}.max_num_seqs=48",
        )

    return until


@pytest.fixture(scope="module")
def exact(run_until) -> Run:
    return run_until(STEPS)


@pytest.fixture(scope="module")
def resumed(run_until, exact, checkpoints) -> Run:
    """One more step, in new processes."""
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    return run_until(STEPS + 1)


def saved(checkpoints: Path, step: int, content: str) -> dict:
    file = checkpoints / f"global_step_{step}" / "actor" / f"{content}_world_size_1_rank_0.pt"
    return torch.load(file, weights_only=False)


def test_trainer_and_rollout_agree_in_every_bit_at_every_step(exact):
    exact.check_exact(STEPS)


def test_every_sync_passed_the_contract_and_changed_the_rollouts_weights(exact):
    assert {(int(sync[1]), int(sync[2])) for sync in exact.syncs} == {(QUANTIZED, PLAIN)}
    assert len({digest for *_, digest in exact.syncs}) == len(exact.syncs) == STEPS + 1


def test_a_sync_sends_a_quarter_of_the_bytes(exact):
    assert exact.mean("actor/jetrl/sync_megabytes") < 0.3 * exact.mean("actor/jetrl/sync_stock_megabytes")


def test_training_resumes_from_the_checkpoint_and_agrees_in_every_bit(exact, resumed):
    """The first sync after the resume sends the weights of the last one before it."""
    assert resumed.steps("rollout_corr/k3_kl") == resumed.steps("actor/ppo_kl") == [0.0], "one step is left"
    assert resumed.syncs[0][-1] == exact.syncs[-1][-1] != resumed.syncs[-1][-1]
    assert 0 < resumed.steps("actor/grad_norm")[0] < math.inf


def test_a_checkpoint_has_experts_and_moments_in_transformers_shapes(resumed, start, checkpoints):
    """A layer's experts are one 3-D tensor; the resume kept the moments, or their step would be 1."""
    stock = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()
    for step in (STEPS, STEPS + 1):
        weights = saved(checkpoints, step, "model")
        assert {name: weight.shape for name, weight in weights.items()} == {
            name: weight.shape for name, weight in stock.items()
        }
        experts = [weight for name, weight in weights.items() if ".experts." in name]
        assert len(experts) == 4 and {weight.dim() for weight in experts} == {3}
        moments = saved(checkpoints, step, "optim")["state"].values()
        assert len(moments) == len(stock) and {int(moment["step"]) for moment in moments} == {step}
        assert sum(moment["exp_avg"].dim() == 3 for moment in moments) == 4
        assert all(whole(moment["exp_avg"]).abs().sum() > 0 for moment in moments)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def test_the_export_equals_the_rollouts_last_weights(resumed, checkpoints, tmp_path):
    (exported,) = export(checkpoints, tmp_path / "fp8", ExportOptions("fp8"))
    assert f"{exported.digest:#018x}" == resumed.syncs[-1][-1]


def test_the_merger_writes_the_layout_of_the_first_folder(resumed, start, checkpoints, tmp_path):
    merge_checkpoint(checkpoints / f"global_step_{STEPS + 1}" / "actor", tmp_path / "merged")
    before, after = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (start, tmp_path / "merged")
    )
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert sum(".experts." in name for name in after) == 2 * POLICIES["moe"].experts * 3
    assert all(not torch.equal(after[name].float(), before[name].float()) for name in before if ".experts." in name)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged(torch.arange(8)[None]).logits.isfinite().all()

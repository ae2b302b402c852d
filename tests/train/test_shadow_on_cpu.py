# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shadow forwards in verl's engine under FSDP2 on two processes compute the BF16 policy and do not change training."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import build
from tensordict import TensorDict
from tiny_models import tiny_model
from two_processes import WORLD, in_two_processes

from jetrl_verl.algorithms.calibrated_clipping import RatioStatistics
from jetrl_verl.train.shadow import CalibratedClipping

pytestmark = pytest.mark.usefixtures("cpu_platform")
SEQUENCES, PROMPT, RESPONSE = 4, 3, 20
LEARNING_RATE, CLIP_LOW = 2e-3, 0.45
"""The user's ``clip_ratio_low``; verl's ``clip_ratio`` is 0.2. At this learning rate the first update puts half of the
negative-advantage tokens under 1 - CLIP_LOW and a third between the two bounds, however BF16 products round."""


def build_actor(folder: str, train: str = "fp8", clip: str = "calibrated", operations: str = "stock"):
    """Actor engine, under FP8 with calibrated clipping every second step."""
    fp8, bf16 = {"stock": ("jet_fp8", "fp8_rollout"), "shared": ("jet_fp8_exact", "bf16_shared")}[operations]
    options = {"fp8": dict(precision=fp8, clip=clip, clip_interval=2), "bf16": dict(precision=bf16)}
    return build(folder, optimizer={"lr": LEARNING_RATE}, train=train, operations=operations, **options[train])


def jagged(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(rank: int, dynamic: bool = False) -> TensorDict:
    """This rank's sequences as verl's trainer sends them, in two micro-batches; advantages of both signs.

    ``dynamic`` micro-batches are cut by tokens, which reorders the sequences.
    """
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 64, (SEQUENCES, PROMPT + RESPONSE), generator=generator)
    data = TensorDict(
        {
            "input_ids": jagged(tokens),
            "prompts": jagged(tokens[:, :PROMPT]),
            "responses": jagged(tokens[:, PROMPT:]),
            "position_ids": jagged(torch.arange(PROMPT + RESPONSE).expand(SEQUENCES, -1)),
            "loss_mask": jagged(torch.ones(SEQUENCES, RESPONSE, dtype=torch.int64)),
            "response_mask": jagged(torch.ones(SEQUENCES, RESPONSE, dtype=torch.int64)),
            "advantages": jagged(torch.randn(SEQUENCES, RESPONSE, generator=generator)),
        },
        batch_size=SEQUENCES,
    )
    cut = (
        dict(max_token_len_per_gpu=SEQUENCES // 2 * (PROMPT + RESPONSE))
        if dynamic
        else dict(micro_batch_size_per_gpu=SEQUENCES // 2)
    )
    settings = dict(use_dynamic_bsz=dynamic, use_remove_padding=False, global_batch_size=SEQUENCES * WORLD)
    tu.assign_non_tensor(data, temperature=1.0, **settings, **cut)
    return data


def actor_loss():
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, clip_ratio_low=CLIP_LOW)
    return partial(ppo_loss, config=config)


def responses(nested: torch.Tensor) -> torch.Tensor:
    """verl's shift: the token at position p is scored at position p - 1."""
    return torch.stack(list(nested.unbind()))[:, PROMPT - 1 : -1]


def full_weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in engine.module.state_dict().items()}


def log_probs_at(engine, weights: dict[str, torch.Tensor], data: TensorDict) -> torch.Tensor:
    """Log-probabilities of every token of ``data``, nested. The engine keeps ``weights``."""
    from torch.distributed.tensor import distribute_tensor

    engine.module.reshard()
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["log_probs"]


def step(
    engine, rank: int, loss, dynamic: bool = False, before_update: Callable[[], None] = lambda: None
) -> tuple[dict, TensorDict]:
    """One step as verl's worker runs it: log-probabilities of the whole batch, then two updates on it."""
    data = batch(rank, dynamic)
    with engine.eval_mode():
        inferred = engine.infer_batch(data)["model_output"]
    data["old_log_probs"] = jagged(responses(inferred["log_probs"]))
    if "shadow_log_probs" in inferred:
        data["shadow_log_probs"] = inferred["shadow_log_probs"]
    with engine.train_mode():
        for _ in range(2):
            before_update()
            outputs = engine.train_batch(data.copy(), loss)
    return outputs["metrics"], inferred


@pytest.mark.parametrize("dynamic, operations", [(False, "stock"), (True, "stock"), (False, "shared")])
@in_two_processes
def test_shadow_forwards_are_the_bf16_policy_and_do_not_change_training(rank, folder, dynamic, operations):
    plain, shadowed = (build_actor(folder, clip=clip, operations=operations) for clip in ("fixed", "calibrated"))
    bf16 = build_actor(folder, train="bf16", operations=operations)
    loss, plain_loss = actor_loss(), actor_loss()

    # Step 1 collects nothing and has the initial bounds.
    metrics, inferred = step(shadowed, rank, loss, dynamic)
    assert "shadow_log_probs" not in inferred
    assert (metrics["actor/clip_lower_bound"], metrics["actor/clip_upper_bound"]) == ([0.6], [1.8])
    object.__setattr__(plain_loss.keywords["config"], "clip_ratio_low", 1 - 0.6)
    object.__setattr__(plain_loss.keywords["config"], "clip_ratio_high", 1.8 - 1)
    expected, _ = step(plain, rank, plain_loss, dynamic)
    assert metrics["grad_norm"] == expected["grad_norm"]

    # Step 2 runs the BF16 policy too; the FP8 policy and its update equal those of a run without it.
    weights = []
    metrics, inferred = step(shadowed, rank, loss, dynamic)
    expected, undisturbed = step(plain, rank, plain_loss, dynamic, lambda: weights.append(full_weights(plain)))
    assert torch.equal(inferred["log_probs"].values(), undisturbed["log_probs"].values())
    assert metrics["grad_norm"] == expected["grad_norm"]
    statistics = shadowed.feature(CalibratedClipping).clip.statistics
    assert sum(statistics.tokens) == 2 * SEQUENCES * RESPONSE, "two updates on every token"

    # The shadow is the policy that precision=bf16, or bf16_shared, would train.
    data = batch(rank, dynamic)
    bf16_at = [log_probs_at(bf16, state, data) for state in weights]
    assert torch.equal(inferred["shadow_log_probs"].values(), bf16_at[0].values())
    assert not torch.equal(inferred["shadow_log_probs"].values(), inferred["log_probs"].values())

    # The statistics are of both policies' ratios, at each update's weights to those before the step. The sums are
    # exact in FP64, so the order of micro-batches does not matter.
    fp8_at = [log_probs_at(plain, state, data) for state in weights]
    assert torch.equal(fp8_at[0].values(), undisturbed["log_probs"].values())
    advantages = torch.stack(list(data["advantages"].unbind()))
    measured = RatioStatistics()
    for fp8, bf16_now in zip(fp8_at, bf16_at, strict=True):
        ratio = (responses(fp8) - responses(fp8_at[0])).exp()
        bf16_ratio = (responses(bf16_now) - responses(bf16_at[0])).exp()
        measured.add(ratio, bf16_ratio, advantages, torch.ones_like(ratio, dtype=torch.bool), 1 - CLIP_LOW)
    assert torch.equal(statistics._sums, measured._sums)
    between = (bf16_ratio >= 1 - CLIP_LOW) & (bf16_ratio < 1 - 0.2) & (advantages < 0)
    assert between.any(), "the test would not see another bound than the user's"

    # Step 3 starts with bounds from step 2's tokens of both ranks.
    clipped = torch.tensor(statistics.bf16_clipped)
    metrics, _ = step(shadowed, rank, loss, dynamic)
    bounds = torch.tensor([metrics["actor/clip_lower_bound"][0], metrics["actor/clip_upper_bound"][0]])
    gathered = [torch.empty_like(bounds) for _ in range(WORLD)]
    dist.all_gather(gathered, bounds)
    dist.all_reduce(clipped)
    assert torch.equal(*gathered) and bounds.tolist() != pytest.approx([0.6, 1.8])
    assert clipped > 0, "nothing was clipped: the test would not see a wrong quantile"


@in_two_processes
def test_a_resume_keeps_the_bounds(rank, folder, tmp_path):
    checkpoint = f"{tmp_path}/{rank}"  # one disk per rank, as on machines without a shared one
    engine, loss = build_actor(folder), actor_loss()
    for _ in range(2):
        step(engine, rank, loss)
    engine.save_checkpoint(checkpoint, global_step=2)
    clip = engine.feature(CalibratedClipping).clip
    assert (clip.low, clip.high) != (0.6, 1.8), "saved after the calibration"
    resumed = build_actor(folder)
    resumed.load_checkpoint(checkpoint, del_local_after_load=False)
    assert (Path(checkpoint) / "calibrated_clip.json").exists() == (rank == 0)
    assert resumed.feature(CalibratedClipping).clip.state_dict() == clip.state_dict()
    assert step(engine, rank, loss)[0]["grad_norm"] == step(resumed, rank, actor_loss())[0]["grad_norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(path)
    return str(path)

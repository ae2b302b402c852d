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
"""Shadow forwards in verl's engine under FSDP2 on two processes: what they compute, and that training is as before."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import build
from tensordict import TensorDict
from tiny_models import tiny_model
from two_processes import WORLD, run_in_two_processes

SEQUENCES, PROMPT, RESPONSE = 4, 3, 20


def build_actor(folder: str, train: str = "fp8"):
    """Actor engine, under FP8 with calibrated clipping every second step."""
    options = {
        "fp8": dict(precision="jet_fp8", clip="calibrated", clip_interval=2),
        "bf16": dict(precision="fp8_rollout"),
    }
    return build(folder, optimizer={"lr": 1e-2}, train=train, **options[train])


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

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, clip_ratio_low=0.3)
    return partial(ppo_loss, config=config)


def responses(nested: torch.Tensor) -> torch.Tensor:
    """verl's shift: the token at position p is scored at position p - 1."""
    return torch.stack(list(nested.unbind()))[:, PROMPT - 1 : -1]


def step(engine, rank: int, loss, dynamic: bool = False, updates: int = 2) -> tuple[dict, TensorDict]:
    """One step as verl's worker runs it: log-probabilities of the whole batch, then updates on it."""
    data = batch(rank, dynamic)
    with engine.eval_mode():
        inferred = engine.infer_batch(data)["model_output"]
    data["old_log_probs"] = jagged(responses(inferred["log_probs"]))
    if "shadow_log_probs" in inferred:
        data["shadow_log_probs"] = inferred["shadow_log_probs"]
    with engine.train_mode():
        for _ in range(updates):
            outputs = engine.train_batch(data.copy(), loss)
    return outputs["metrics"], inferred


def shadow_forwards(rank: int, folder: str, dynamic: bool) -> None:
    plain, shadowed, bf16 = build_actor(folder), build_actor(folder), build_actor(folder, train="bf16")
    plain.calibrated_clip = None
    loss, plain_loss = actor_loss(), actor_loss()

    # Step 1 collects nothing, and its bounds are the start's.
    metrics, inferred = step(shadowed, rank, loss, dynamic)
    assert "shadow_log_probs" not in inferred
    assert (metrics["actor/clip_lower_bound"], metrics["actor/clip_upper_bound"]) == ([0.6], [1.8])
    object.__setattr__(plain_loss.keywords["config"], "clip_ratio_low", 1 - 0.6)
    object.__setattr__(plain_loss.keywords["config"], "clip_ratio_high", 1.8 - 1)
    expected, _ = step(plain, rank, plain_loss, dynamic)
    assert metrics["grad_norm"] == expected["grad_norm"]

    # Step 2 runs the BF16 policy on the same tokens; the FP8 policy and its update are those of a run without.
    bf16_old = {name: tensor.full_tensor() for name, tensor in shadowed.module.state_dict().items()}
    metrics, inferred = step(shadowed, rank, loss, dynamic)
    expected, undisturbed = step(plain, rank, plain_loss, dynamic)
    assert torch.equal(inferred["log_probs"].values(), undisturbed["log_probs"].values())
    assert metrics["grad_norm"] == expected["grad_norm"]
    statistics = shadowed.calibrated_clip.statistics
    assert sum(statistics.tokens) == 2 * SEQUENCES * RESPONSE, "two updates on every token"

    # The shadow is the policy that precision=bf16 would train.
    for name, parameter in bf16.module.named_parameters():
        from torch.distributed.tensor import distribute_tensor

        parameter.data.copy_(distribute_tensor(bf16_old[name], parameter.device_mesh, parameter.placements))
    with bf16.eval_mode():
        reference = bf16.infer_batch(batch(rank, dynamic))["model_output"]["log_probs"]
    assert torch.equal(inferred["shadow_log_probs"].values(), reference.values())
    assert not torch.equal(inferred["shadow_log_probs"].values(), inferred["log_probs"].values())

    # Step 3 starts with the bounds of step 2's tokens of both ranks.
    clipped = torch.tensor(statistics.bf16_clipped)
    metrics, _ = step(shadowed, rank, loss, dynamic)
    bounds = torch.tensor([metrics["actor/clip_lower_bound"][0], metrics["actor/clip_upper_bound"][0]])
    every = [torch.empty_like(bounds) for _ in range(WORLD)]
    dist.all_gather(every, bounds)
    dist.all_reduce(clipped)
    assert torch.equal(*every) and bounds.tolist() != pytest.approx([0.6, 1.8])
    assert clipped > 0, "nothing was clipped: the test would not see a wrong quantile"


def bounds_survive_a_resume(rank: int, folder: str, checkpoint: str) -> None:
    engine, loss = build_actor(folder), actor_loss()
    for _ in range(2):
        step(engine, rank, loss)
    engine.save_checkpoint(checkpoint, global_step=2)
    clip = engine.calibrated_clip
    assert (clip.low, clip.high) != (0.6, 1.8), "saved after the calibration, so with its result"
    resumed = build_actor(folder)
    resumed.load_checkpoint(checkpoint, del_local_after_load=False)
    assert resumed.calibrated_clip.state_dict() == clip.state_dict()
    assert step(engine, rank, loss)[0]["grad_norm"] == step(resumed, rank, actor_loss())[0]["grad_norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_shadow_forwards_are_the_bf16_policy_and_leave_training_alone(folder, dynamic, cpu_platform):
    run_in_two_processes(shadow_forwards, folder, dynamic)


def test_bounds_survive_a_resume(folder, tmp_path: Path, cpu_platform):
    run_in_two_processes(bounds_survive_a_resume, folder, str(tmp_path / "checkpoint"))

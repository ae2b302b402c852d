# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``actor.optim`` with ``optimizer=AdamW8bit optimizer_impl=torchao.optim`` under FSDP2: its state, step and resume."""

from pathlib import Path

import torch
from engines import build
from tiny_models import tiny_model
from torch.distributed.tensor import DTensor
from two_processes import run_in_two_processes

TOKENS = 24
ADAMW_8BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}


def train(engine, rank: int, step: int) -> None:
    """One update and one step of the learning rate."""
    from functools import partial

    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    tokens = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[:, 0] = 0
    fields = {"input_ids": tokens, "position_ids": torch.arange(TOKENS).expand(2, -1), "loss_mask": mask}
    data = TensorDict(
        {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()},
        batch_size=2,
    )
    settings = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_remove_padding=False)
    tu.assign_non_tensor(data, temperature=1.0, **settings)
    with engine.train_mode():
        assert engine.train_batch(data, partial(sft_loss, None))["metrics"]["grad_norm"] > 0
    engine.lr_scheduler_step()


def state_bytes(engine) -> int:
    """Bytes of both moments on this rank."""
    total = 0
    for state in engine.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            local = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            parts = [getattr(local, part) for part in ("codes", "scale") if hasattr(local, part)]
            total += sum(part.nbytes for part in parts or [local])
    return total


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in engine.module.state_dict().items()}


def trains_and_resumes(rank: int, folder: str, checkpoint: str) -> None:
    # Compiling the update for each shape would take several times as long.
    torch.compiler.set_stance("force_eager")
    engine = build(folder, optimizer=ADAMW_8BIT)
    start = weights(engine)
    for step in range(2):
        train(engine, rank, step)
    moved = weights(engine)
    assert all(not torch.equal(moved[name], tensor) for name, tensor in start.items())

    exact = build(folder)
    for step in range(2):
        train(exact, rank, step)
    ratio = state_bytes(engine) / state_bytes(exact)
    print(f"rank {rank}: optimizer state {state_bytes(engine)} bytes, {ratio:.3f} of FP32")
    # One byte a value and one FP32 scale per 256, but FP32 for tensors under 4096 values a rank.
    assert 0.25 < ratio < 0.3
    change, exact_change = ([w[n] - start[n] for n in start] for w in (moved, weights(exact)))
    cosine = torch.nn.functional.cosine_similarity(
        *(torch.cat([t.flatten() for t in c]) for c in (change, exact_change)), 0
    )
    assert cosine > 0.95, f"not the update of AdamW: {cosine}"

    engine.save_checkpoint(checkpoint, global_step=2)
    train(engine, rank, 2)
    resumed = build(folder, optimizer=ADAMW_8BIT)
    resumed.load_checkpoint(checkpoint, del_local_after_load=False)
    train(resumed, rank, 2)
    expected, restored = weights(engine), weights(resumed)
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items()), (
        "the moments were not restored"
    )


def test_adamw_with_8_bit_moments_trains_and_resumes(tmp_path: Path, cpu_platform):
    folder = tmp_path / "model"
    tiny_model("qwen3", vocab_size=128).save_pretrained(folder)
    run_in_two_processes(trains_and_resumes, str(folder), str(tmp_path / "checkpoint"))

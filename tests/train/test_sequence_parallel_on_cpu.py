# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses around the shared operations: every value has the bits that it has on one rank, gradients follow."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from engines import build
from tensordict import TensorDict
from tiny_models import tiny_model
from two_processes import joined, run_in_processes, run_in_two_processes

from jetrl_verl import kernels

LENGTHS = (7, 1, 40, 23)
"""71 tokens: no number of ranks divides them, and slices begin within a sequence."""


def batch(packed: bool) -> TensorDict:
    """All sequences in one micro-batch, in verl's jagged form."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(0)
    rows = {
        "input_ids": [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS],
        "position_ids": [torch.arange(length) for length in LENGTHS],
        "loss_mask": [(torch.arange(length) > 0).long() for length in LENGTHS],
    }
    jagged = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    data = TensorDict(jagged, batch_size=len(LENGTHS))
    cut = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=len(LENGTHS), use_remove_padding=packed)
    tu.assign_non_tensor(data, temperature=0.7, pad_token_id=0, **cut)
    return data


def outputs(engine, packed: bool) -> dict[str, torch.Tensor]:
    with engine.eval_mode():
        return engine.infer_batch(batch(packed))["model_output"]


def step(engine, packed: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradient's norm, which verl reports on one rank alone, and every parameter's gradient, whole."""
    from verl.workers.utils.losses import sft_loss

    found, norms = {}, []
    take = engine.optimizer_step

    def watched():
        found.update({name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()})
        norms.append(take())
        return norms[0]

    engine.optimizer_step = watched
    with engine.train_mode():
        engine.train_batch(batch(packed), partial(sft_loss, None))
    return float(norms[0]), found


def split_against_whole(rank: int, folder: str, checkpointing: bool) -> None:
    options = dict(precision="jet_fp8_exact", operations="shared", optimizer={"lr": 1e-4})
    alone, split = build(folder, **options), build(folder, ulysses=2, **options)
    padded = build(folder, **options)
    if checkpointing:
        for engine in (alone, split, padded):
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    want, got, rows = outputs(alone, True), outputs(split, True), outputs(padded, False)
    assert torch.equal(got["log_probs"].values(), want["log_probs"].values())
    assert torch.equal(rows["log_probs"].values(), want["log_probs"].values())

    # The same batch on both ranks: two equal gradients averaged, or one summed over both slices of it.
    (norm, gradients), (split_norm, split_gradients) = step(alone, True), step(split, True)
    assert split_norm == pytest.approx(norm, rel=0.02)
    for name, gradient in gradients.items():
        # The weight's gradient is quantized along tokens, by groups of 128 that a slice cuts elsewhere.
        error = (split_gradients[name] - gradient).norm()
        assert error < 0.06 * gradient.norm() + 1e-6, (name, float(error / gradient.norm()))
    # Behind an update that differs in rounding alone.
    moved, split_moved = outputs(alone, True), outputs(split, True)
    assert not torch.equal(moved["log_probs"].values(), want["log_probs"].values())
    torch.testing.assert_close(split_moved["log_probs"].values(), moved["log_probs"].values(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("family", "changes", "checkpointing"),
    [("qwen3", {}, True), ("qwen2", dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2), False)],
    ids=["one key head for both ranks", "a key head for each rank"],
)
def test_log_probabilities_are_those_of_one_rank(cpu_platform, tmp_path, family, changes, checkpointing):
    tiny_model(family, **changes).save_pretrained(tmp_path)
    run_in_two_processes(split_against_whole, str(tmp_path), checkpointing)


def every_arrangement(rank: int, folder: str) -> None:
    from verl.workers.utils.losses import sft_loss

    options = dict(precision="jet_fp8_exact", operations="shared", optimizer={"lr": 1e-4}, rollout_ranks=2)
    found, moved = {}, {}
    for name, arrangement in {
        "FSDP2": {},
        "FSDP1": dict(strategy="fsdp"),
        "HSDP": dict(fsdp_size=1),
        "Ulysses": dict(ulysses=2),
        "Ulysses in replicas": dict(ulysses=2, fsdp_size=1),
    }.items():
        engine = build(folder, **options, **arrangement)
        found[name] = outputs(engine, True)["log_probs"].values()
        if "ulysses" not in arrangement:
            found[f"{name}, padded"] = outputs(engine, False)["log_probs"].values()
        with engine.train_mode():
            engine.train_batch(batch(True), partial(sft_loss, None))
        moved[name] = outputs(engine, True)["log_probs"].values()
    whole = build(folder, **options | dict(rollout_ranks=1))
    assert not torch.equal(outputs(whole, True)["log_probs"].values(), found["FSDP2"]), "ranks round"
    for name, values in found.items():
        assert torch.equal(values, found["FSDP2"]), name
    for name, values in moved.items():
        assert not torch.equal(values, found["FSDP2"]), f"{name} took no step"
        torch.testing.assert_close(values, moved["FSDP2"], atol=0.05, rtol=0.05)


def test_the_sums_of_a_rollouts_ranks_are_those_of_every_arrangement_of_the_trainer(cpu_platform, tmp_path):
    """FSDP and HSDP do not touch a forward's bits, nor does Ulysses; two replicas of one rank each hold all weights."""
    sizes = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    tiny_model("qwen3", **sizes).save_pretrained(tmp_path)
    run_in_two_processes(every_arrangement, str(tmp_path))


def attention_over_ranks(rank: int, world: int, store: str) -> None:
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    from jetrl_verl.train import sequence_parallel

    with joined(rank, world, store):
        set_ulysses_sequence_parallel_group(dist.group.WORLD)
        tokens = 72
        cu_seqlens = torch.tensor([0, 7, 8, 48, tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])[None]
        mine = slice(rank * tokens // world, (rank + 1) * tokens // world)
        assert torch.equal(sequence_parallel.whole(positions[:, mine]), positions)
        heads = max(4, world)
        for key_heads in (1, 2, heads):
            generator = torch.Generator().manual_seed(key_heads)
            operands = [
                torch.randn(tokens, count, 128, generator=generator).bfloat16()
                for count in (heads, key_heads, key_heads)
            ]
            gradient = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
            whole = [x.clone().requires_grad_() for x in operands]
            expected = kernels.attention(*whole, cu_seqlens, 40, 128**-0.5)
            expected.backward(gradient)
            local = [x[mine].clone().requires_grad_() for x in operands]
            out = kernels.attention(*sequence_parallel.by_heads(*local), cu_seqlens, 40, 128**-0.5)
            out = sequence_parallel.by_tokens(out)
            assert torch.equal(out, expected[mine])
            out.backward(gradient[mine])
            for ours, theirs in zip(local, whole, strict=True):
                # A key head that ranks share has its gradient summed over them, in BF16.
                torch.testing.assert_close(ours.grad, theirs.grad[mine], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_attention_over_any_number_of_ranks(world):
    with TemporaryDirectory() as folder:
        run_in_processes(world, attention_over_ranks, world, str(Path(folder) / "store"))

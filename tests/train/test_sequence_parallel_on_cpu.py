# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses around the shared operations: every value has the bits that it has on one rank, gradients are close."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from engines import batch, build, outputs
from tiny_models import tiny_model
from two_processes import joined, run_in_processes, run_in_two_processes

from jetrl_verl import kernels

LENGTHS = (7, 1, 40, 23)
"""71 tokens, a prime number: slices begin within a sequence."""


FORM = dict(lengths=LENGTHS, temperature=0.7)


def log_probs(engine, packed: bool, micro_batches: int = 1) -> torch.Tensor:
    """Of every sequence's tokens from the second on."""
    return outputs(engine, 0, packed=packed, micro_batches=micro_batches, **FORM)


def step(engine, packed: bool, micro_batches: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradient's norm, which verl reports on one rank alone, and every parameter's whole gradient; none with FSDP1,
    whose parameters are flat vectors."""
    from verl.workers.utils.losses import sft_loss

    gradients, norms = {}, []
    stock = engine.optimizer_step

    def watched():
        if engine.engine_config.strategy == "fsdp2":
            trained = ((name, p.grad) for name, p in engine.module.named_parameters() if p.grad is not None)
            gradients.update({name: gradient.full_tensor().clone() for name, gradient in trained})
        norms.append(stock())
        return norms[0]

    engine.optimizer_step = watched
    with engine.train_mode():
        data = batch(0, packed=packed, micro_batches=micro_batches, **FORM)
        engine.train_batch(data, partial(sft_loss, None))
    return float(norms[0]), gradients


def split_against_whole(rank: int, folder: str, checkpointing: bool) -> None:
    options = dict(precision="jet_fp8_exact", operations="shared", optimizer={"lr": 1e-4}, checkpointing=checkpointing)
    alone, split = build(folder, **options), build(folder, ulysses=2, **options)
    padded = build(folder, **options)
    assert split.module.is_gradient_checkpointing is checkpointing
    expected = log_probs(alone, True)
    assert torch.equal(log_probs(split, True), expected)
    assert torch.equal(log_probs(padded, False), expected)

    # The same batch on both ranks: two equal gradients averaged, or the gradients of both slices added.
    (norm, gradients), (split_norm, split_gradients) = step(alone, True), step(split, True)
    assert split_norm == pytest.approx(norm, rel=0.02)
    for name, gradient in gradients.items():
        # The operands of a weight's gradient are quantized in groups of 128 tokens, which a slice cuts elsewhere.
        error = (split_gradients[name] - gradient).norm()
        assert error < 0.06 * gradient.norm() + 1e-6, (name, float(error / gradient.norm()))
    # After an update that differs in rounding alone.
    moved, split_moved = log_probs(alone, True), log_probs(split, True)
    assert not torch.equal(moved, expected)
    torch.testing.assert_close(split_moved, moved, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("family", "changes", "checkpointing"),
    [
        ("qwen3", {}, True),
        ("qwen2", dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2), False),
        ("qwen3_5", dict(linear_num_key_heads=2, linear_num_value_heads=4), True),
    ],
    ids=["one key head for both ranks", "a key head for each rank", "delta nets"],
)
def test_log_probabilities_are_those_of_one_rank(cpu_platform, tmp_path, family, changes, checkpointing):
    tiny_model(family, **changes).save_pretrained(tmp_path)
    run_in_two_processes(split_against_whole, str(tmp_path), checkpointing)


def every_arrangement(rank: int, folder: str) -> None:
    options = dict(precision="jet_fp8_exact", operations="shared", optimizer={"lr": 1e-4}, rollout_ranks=2)
    before, moved, norms, gradients = {}, {}, {}, {}
    for name, micro_batches, arrangement in (
        ("FSDP2", 1, {}),
        ("FSDP2, no activation recomputed", 1, dict(checkpointing=False)),
        ("FSDP2, accumulated", 2, {}),
        ("FSDP2, products kept", 1, dict(checkpointing="selective")),
        ("FSDP1", 1, dict(strategy="fsdp")),
        ("FSDP1, products kept", 1, dict(strategy="fsdp", checkpointing="selective")),
        ("FSDP1, accumulated", 2, dict(strategy="fsdp")),
        ("HSDP", 1, dict(fsdp_size=1)),
        ("Ulysses", 1, dict(ulysses=2)),
        ("Ulysses, products kept", 1, dict(ulysses=2, checkpointing="selective")),
        ("Ulysses, accumulated", 2, dict(ulysses=2)),
        ("Ulysses in replicas", 1, dict(ulysses=2, fsdp_size=1)),
        ("Ulysses under FSDP1", 1, dict(strategy="fsdp", ulysses=2)),
        ("Ulysses under FSDP1, accumulated", 2, dict(strategy="fsdp", ulysses=2)),
    ):
        engine = build(folder, **options, **arrangement)
        before[name] = log_probs(engine, True, micro_batches)
        if "ulysses" not in arrangement:
            before[f"{name}, padded"] = log_probs(engine, False, micro_batches)
        norms[name], gradients[name] = step(engine, True, micro_batches)
        moved[name] = log_probs(engine, True, micro_batches)
    whole = build(folder, **options | dict(rollout_ranks=1))
    assert not torch.equal(log_probs(whole, True), before["FSDP2"]), "sums of ranks are rounded"
    for name, values in before.items():
        assert torch.equal(values, before["FSDP2"]), name
    for name, values in moved.items():
        assert norms[name] == pytest.approx(norms["FSDP2"], rel=1e-3), name
        assert not torch.equal(values, before["FSDP2"]), f"{name} took no step"
        torch.testing.assert_close(values, moved["FSDP2"], atol=0.05, rtol=0.05)
    # Recomputed activations have the bits of stored ones.
    for stored in (name for name in norms if name.endswith(("no activation recomputed", "products kept"))):
        whole = stored.partition(",")[0]
        assert norms[stored] == norms[whole] and torch.equal(moved[stored], moved[whole]), stored
        assert all(torch.equal(gradient, gradients[whole][name]) for name, gradient in gradients[stored].items())


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2)),
        pytest.param("qwen3_5", dict(linear_num_key_heads=2), marks=pytest.mark.slow),
    ],
)
def test_every_arrangement_of_the_trainer_repeats_the_rollouts_sums(cpu_platform, tmp_path, family, sizes):
    """FSDP, HSDP, Ulysses and micro-batches change no bit of a forward; two replicas of one rank each have all
    weights."""
    tiny_model(family, **sizes, intermediate_size=512).save_pretrained(tmp_path)
    run_in_two_processes(every_arrangement, str(tmp_path))


def attention_over_ranks(rank: int, world: int, store: str) -> None:
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    from jetrl_verl.train import sequence_parallel

    with joined(rank, world, store):
        set_ulysses_sequence_parallel_group(dist.group.WORLD)
        tokens = 72
        cu_seqlens = torch.tensor([0, 7, 8, 48, tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])[None]
        part = slice(rank * tokens // world, (rank + 1) * tokens // world)
        assert torch.equal(sequence_parallel.whole(positions[:, part]), positions)
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
            local = [x[part].clone().requires_grad_() for x in operands]
            out = kernels.attention(*sequence_parallel.by_heads(*local), cu_seqlens, 40, 128**-0.5)
            out = sequence_parallel.by_tokens(out)
            assert torch.equal(out, expected[part])
            out.backward(gradient[part])
            for x, whole_x in zip(local, whole, strict=True):
                # A key head that ranks share has its gradient summed over them, in BF16.
                torch.testing.assert_close(x.grad, whole_x.grad[part], atol=0.02, rtol=0.02)
        set_ulysses_sequence_parallel_group(None)  # the process is reused


def delta_net_over_ranks(rank: int, world: int, store: str) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    from jetrl_verl.models.families.base import DeltaNet
    from jetrl_verl.train.delta_net import delta_net_forward
    from jetrl_verl.train.packing import Packing

    def run(module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module.zero_grad()
        x = x.clone().requires_grad_()
        out = delta_net_forward(module, x, packing, names=DeltaNet())
        out.backward(gradient)
        return out.detach(), x.grad, *(p.grad.float() for p in module.parameters())

    with joined(rank, world, store):
        tokens, part = 72, slice(rank * 72 // world, (rank + 1) * 72 // world)
        packing = Packing.of(torch.cat([torch.arange(n) for n in (7, 1, 40, 24)])[None], None)
        for key_heads, value_heads in ((world, 2 * world), (1, world)):
            torch.manual_seed(key_heads)
            heads = dict(linear_num_key_heads=key_heads, linear_num_value_heads=value_heads)
            module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=128, **heads), 0).to(torch.bfloat16)
            x, gradient = torch.randn(2, 1, tokens, 128).bfloat16()

            set_ulysses_sequence_parallel_group(None)
            out, dx, *whole = run(module, x, gradient)
            set_ulysses_sequence_parallel_group(dist.group.WORLD)
            out_of_rank, dx_of_rank, *parts = run(module, x[:, part], gradient[:, part])
            assert torch.equal(out_of_rank, out[:, part])
            torch.testing.assert_close(dx_of_rank, dx[:, part], atol=0.05, rtol=0.05)
            for name, expected, summed in zip(dict(module.named_parameters()), whole, parts, strict=True):
                dist.all_reduce(summed)
                assert (summed - expected).norm() < 0.03 * expected.norm(), name
        set_ulysses_sequence_parallel_group(None)


@pytest.mark.parametrize("function", [attention_over_ranks, delta_net_over_ranks])
@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_operations_over_any_number_of_ranks(world, function):
    with TemporaryDirectory() as folder:
        run_in_processes(world, function, world, str(Path(folder) / "store"))

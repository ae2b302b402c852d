# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experts in the FP8 flow: the forward against the reference's dense products, gradients against float64, saved
and peak memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_config
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels import dispatch
from jetrl_verl.models.families.base import Experts
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.reference import QuantizedTensor

RULE, FLOW = "fp32", formats.get("fp8")
EXPERTS, HIDDEN, INNER = 8, 256, 128


def experts_module(ranks: int = 1, seed: int = 0, inner: int = INNER) -> tuple[JetExperts, nn.Module]:
    """The FP8 experts and the stock ones in float64."""
    torch.manual_seed(seed)
    stock = Qwen3MoeExperts(tiny_config("qwen3_moe", moe_intermediate_size=inner))
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.05)
    return JetExperts.replace(copy.deepcopy(stock), FLOW, Experts(), scale_rule=RULE, ranks=ranks), stock.double()


def inputs(tokens: int, k: int = 2, used: int = EXPERTS, seed: int = 1):
    """Hidden states, logits whose experts are below ``used``, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    logits[:, used:] -= 100
    return x, logits, torch.randn(tokens, HIDDEN, generator=generator).bfloat16()


def in_float64(stock: nn.Module, x: torch.Tensor, logits: torch.Tensor, k: int) -> torch.Tensor:
    weights, chosen = logits.softmax(dim=-1).topk(k)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(chosen == expert)
        gate, up = (x[token] @ stock.gate_up_proj[expert].t()).chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up * weights[token, slot, None]
        out = out.index_add(0, token, inner @ stock.down_proj[expert].t())
    return out


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("used", "k"), [(8, 1), (8, 2), (8, 8), (3, 1), (3, 2)])
@pytest.mark.parametrize("tokens", [3, 300])
def test_output_and_gradients_equal_float64_up_to_fp8_rounding(tokens, used, k):
    layer, stock = experts_module()
    x, logits, dy = inputs(tokens, used=used)
    leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    chosen, weights = kernels.route(leaves[1], k, True)
    out = layer(leaves[0], chosen, weights)
    out.backward(dy)
    exact = [x.double().requires_grad_(), logits.double().requires_grad_()]
    expected = in_float64(stock, *exact, k)
    expected.backward(dy.double())
    # E4M3 has 3 mantissa bits: each of two or three operands has an RMS error of 2.7%.
    assert difference(out, expected) < 0.08
    pairs = [(leaves[0].grad, exact[0].grad), (layer.gate_up_proj.grad, stock.gate_up_proj.grad)]
    pairs.append((layer.down_proj.grad, stock.down_proj.grad))
    if k > 1:
        pairs.append((leaves[1].grad, exact[1].grad))
    else:
        assert not leaves[1].grad.any(), "with k = 1 the weight is always 1"
    for got, want in pairs:
        # With three tokens the router's gradient has six numbers, too few to average errors.
        assert difference(got, want) < (0.1 if tokens > 3 else 0.2)
    unused = [e for e in range(EXPERTS) if e not in set(chosen.flatten().tolist())]
    assert not layer.gate_up_proj.grad[unused].any() and not layer.down_proj.grad[unused].any()


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_of_the_routing_weights(renormalize):
    _, logits, _ = inputs(20)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    chosen, weights = kernels.route(leaf, 3, renormalize)
    probabilities = exact.softmax(dim=-1).gather(1, chosen.long())
    want = probabilities / probabilities.sum(dim=1, keepdim=True) if renormalize else probabilities
    assert (weights - want).abs().max() < 1e-6
    gradient = torch.randn(20, 3)
    weights.backward(gradient)
    want.backward(gradient.double())
    assert (leaf.grad - exact.grad).abs().max() < 1e-6


def by_hand(
    layer: JetExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ranks: int
) -> torch.Tensor:
    """Token by token and expert by expert, with the reference's dense products."""
    out = []
    gate_up_weight, down_weight = (
        [reference.quantize_128x128(w.bfloat16(), RULE) for w in p.detach()]
        for p in (layer.gate_up_proj, layer.down_proj)
    )
    for token in range(len(x)):
        row = reference.quantize_1x128(x[token : token + 1], RULE)
        parts = [[] for _ in range(ranks)]
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = reference.gemm_nt(row, gate_up_weight[expert]).chunk(2, dim=1)
            silu = (gate.double() * gate.double().sigmoid()).float()
            inner = reference.quantize_1x128((silu * up.float() * weight).bfloat16(), RULE)
            slices = zip(*(reference.k_slices(q, ranks) for q in (inner, down_weight[expert])), strict=True)
            for part, (a, b) in zip(parts, slices, strict=True):
                part.append(reference.gemm_nt(a, b))
        summed = []
        for part in parts:
            acc = part[0].float()
            for row_of_expert in part[1:]:
                acc += row_of_expert.float()
            summed.append(acc.bfloat16())
        out.append(reference.sum_of_ranks(summed))
    return torch.cat(out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_forward_equals_the_references_products_in_every_bit(ranks):
    layer, _ = experts_module(ranks, inner=256)
    x, logits, _ = inputs(12)
    chosen, weights = kernels.route(logits, 3, True)
    with torch.no_grad():
        assert torch.equal(layer(x, chosen, weights), by_hand(layer, x, chosen, weights, ranks))


def test_a_token_does_not_depend_on_the_batch_or_the_segments():
    layer, _ = experts_module()
    x, logits, _ = inputs(200)
    chosen, weights = kernels.route(logits, 2, True)
    trained = layer(x, chosen, weights)
    assert trained.requires_grad, "segments of 128"
    with torch.no_grad():
        whole = layer(x, chosen, weights)
        order = torch.randperm(200)
        shuffled = layer(x[order], chosen[order], weights[order])
        alone = torch.cat([layer(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(10)])
    assert torch.equal(trained, whole)
    assert torch.equal(shuffled, whole[order])
    assert torch.equal(alone, whole[:10])


def gradients(layer: JetExperts, leaf: torch.Tensor, out: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients; clears the parameters' ones."""
    out.backward(dy)
    tensors = [out.detach(), leaf.grad, layer.gate_up_proj.grad.clone(), layer.down_proj.grad.clone()]
    layer.zero_grad()
    return tensors


def test_a_quantized_input_gives_the_bits_of_its_source():
    layer, _ = experts_module()
    x, logits, dy = inputs(30)
    chosen, weights = kernels.route(logits, 2, True)
    results = []
    for quantize in (False, True):
        leaf = x.clone().requires_grad_()
        hidden = QuantizedTensor(*reference.quantize_1x128(x, RULE), leaf) if quantize else leaf
        results.append(gradients(layer, leaf, layer(hidden, chosen, weights), dy))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointing_changes_no_bit_and_an_unchanged_weight_is_quantized_once():
    layer, _ = experts_module()
    x, logits, dy = inputs(30)
    chosen, weights = kernels.route(logits, 2, True)
    leaf = x.clone().requires_grad_()
    plain = gradients(layer, leaf, layer(leaf, chosen, weights), dy)
    leaf = x.clone().requires_grad_()
    recomputed = gradients(layer, leaf, checkpoint(layer, leaf, chosen, weights, use_reentrant=False), dy)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert [cache.quantizations for cache in layer._caches.values()] == [1, 1]
    assert layer.holds_qdata
    with torch.no_grad():
        layer.down_proj.mul_(2)
        changed = layer(x, chosen, weights)
    assert [cache.quantizations for cache in layer._caches.values()] == [1, 2]
    assert not torch.equal(changed, plain[0])
    layer.drop_qdata()
    assert not layer.holds_qdata


def test_a_frozen_weight_or_input_gets_no_gradient():
    layer, _ = experts_module()
    x, logits, dy = inputs(10)
    chosen, weights = kernels.route(logits, 2, True)
    layer.gate_up_proj.requires_grad_(False)
    layer(x, chosen, weights).backward(dy)
    assert layer.gate_up_proj.grad is None and layer.down_proj.grad is not None


SCALED = 1 + 4 / 128
"""Bytes of an element in FP8, its share of a scale included."""


def saved(module: nn.Module, function: Callable[[], object]) -> list[torch.Tensor]:
    """Tensors that autograd saves for backward, without parameters."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return list(kept.values())


@pytest.mark.parametrize(("tokens", "k"), [(300, 2), (300, 8), (7, 2)])
def test_saved_bytes_are_x_in_fp8_per_token_and_the_activation_per_pair(tokens, k):
    layer, _ = experts_module()
    x, logits, _ = inputs(tokens)
    chosen, weights = kernels.route(logits, k, True)
    leaf = x.requires_grad_()
    kept = saved(layer, lambda: layer(leaf, chosen, weights))
    rows = reference.rows_of_segments(tokens * k, EXPERTS, 128)
    of_token = HIDDEN * SCALED + 2 * k * 4
    of_row = 2 * 2 * INNER + INNER * SCALED + 4
    assert sum(tensor.nbytes for tensor in kept) == tokens * of_token + rows * of_row + 4 * (EXPERTS + 1)
    shapes = {dtype: [tuple(t.shape) for t in kept if t.dtype == dtype] for dtype in {t.dtype for t in kept}}
    assert shapes[torch.bfloat16] == [(rows, 2 * INNER)], "gate and up, for the activation's gradient"
    assert sorted(shapes[torch.float8_e4m3fn]) == sorted([(tokens, HIDDEN), (rows, INNER)])


class Results:
    """Results of kernels that are alive after each call, and their peak bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[tuple[str, torch.dtype, tuple[int, ...], int, StorageWeakRef]] = []
        self.peak, self.calls = 0, []
        for key, backend in dispatch._implementations.items():
            if key[1] == "reference":
                watched = backend._replace(run=self.watch(key[0], backend.run))
                monkeypatch.setitem(dispatch._implementations, key, watched)

    def watch(self, operation: str, run: Callable) -> Callable:
        def watched(*call, **options):
            results = run(*call, **options)
            stack = [results]
            while stack:
                item = stack.pop()
                if isinstance(item, torch.Tensor):
                    storage = item.untyped_storage()
                    facts = operation, item.dtype, tuple(item.shape), storage.nbytes()
                    self.alive.append((*facts, StorageWeakRef(storage)))
                elif isinstance(item, (tuple, QuantizedTensor)):
                    stack += item
            self.calls.append((operation, self.now()))
            return results

        return watched

    def now(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        self.alive = [result for result in self.alive if not result[4].expired()]
        self.peak = max(self.peak, self.nbytes())
        return [result[:3] for result in self.alive]

    def nbytes(self) -> int:
        return sum(result[3] for result in self.alive)


def test_bf16_rows_of_pairs_are_freed_before_the_next_and_never_copied(monkeypatch):
    """Follows every result of a kernel in forward and backward until it is freed."""
    inner = 384
    layer = experts_module(inner=inner)[0].bfloat16()  # as FSDP gathers it
    x, logits, dy = inputs(300)
    chosen, weights = kernels.route(logits, 2, True)
    rows = reference.rows_of_segments(600, EXPERTS, 128)
    leaf, weights = x.requires_grad_(), weights.requires_grad_()
    layer(leaf, chosen, weights)  # quantizes the weights
    results = Results(monkeypatch)
    out = layer(leaf, chosen, weights)
    results.now()
    forward, results.calls = results.calls, []
    saved_bytes, results.peak = results.nbytes(), 0
    out.backward(dy)

    def in_bf16(alive) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(shape for _, dtype, shape in alive if dtype == torch.bfloat16 and shape[0] == rows))

    gate_up, of_hidden, of_inner = (rows, 2 * inner), (rows, HIDDEN), (rows, inner)
    assert {in_bf16(alive) for _, alive in forward} == {(), (gate_up,), (of_hidden, gate_up)}
    assert ("gather_quantized", torch.float8_e4m3fn, of_hidden) not in dict(forward)["combine"], "freed by then"
    # With gate and up: dH while its gradients are computed, then the terms of dX.
    assert {in_bf16(alive) for _, alive in results.calls} == {(gate_up,), (of_inner, gate_up), (of_hidden, gate_up)}
    assert not {"gather_quantized", "quantize_1x128", "quantize_1x128_and_128x1"} & set(dict(results.calls))
    down_gradient = 2 * layer.down_proj.numel()
    weight_gradients = down_gradient + 2 * layer.gate_up_proj.numel()
    transposed = layer.gate_up_proj.numel() * (1 + 4 / 128**2)  # for DGrad
    at_once = {
        "dOut both ways and H colwise": rows * SCALED * (2 * HIDDEN + inner) + down_gradient,
        "dH and its gradients both ways": rows * (2 * inner + SCALED * 4 * inner) + down_gradient,
        "gradients of gate and up both ways and X colwise": rows * SCALED * (4 * inner + HIDDEN) + weight_gradients,
        "gradients of gate and up rowwise and terms of dX": rows * (2 * HIDDEN + SCALED * 2 * inner)
        + weight_gradients
        + transposed,
    }
    assert results.peak - saved_bytes == max(at_once.values()) + 4 * weights.numel()


@pytest.mark.parametrize(
    ("changes", "ranks", "text"),
    [(dict(inner=192), 1, "do not divide into blocks of 128"), (dict(inner=128), 2, "2 ranks of the rollout")],
)
def test_dimensions_off_the_fp8_block_are_refused(changes, ranks, text):
    with pytest.raises(ValueError, match=text):
        experts_module(ranks, **changes)

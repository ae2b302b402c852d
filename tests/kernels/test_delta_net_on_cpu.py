# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A gated delta net's operations on the CPU: equal bits wherever a sequence is cut, values, gradients."""

import random
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from jetrl_verl import kernels
from jetrl_verl.reference import delta_net

rule = sys.modules["jetrl_verl.kernels.gated_delta_rule"]  # the package's attribute is the function
LENGTHS = (131, 1, 2, 64, 3, 70)
KEYS, HEADS, EPS = 2, 4, 1e-6
COLUMNS = (2 * KEYS + HEADS) * 128


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def sequences(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    """x, conv weight, b, a, A_log and dt_bias; the first head hardly forgets, the last one forgets at once."""
    b, a = (normal(tokens, HEADS, seed=seed).float() * 2 for seed in (1, 2))
    a_log, dt_bias = torch.tensor([-6.0, 0.1, 1.7, 2.77]), torch.tensor([-4.0, 0.3, 1.0, 25.0])
    return normal(tokens, COLUMNS), normal(COLUMNS, 4, seed=3) / 2, b, a, a_log, dt_bias


def layer(x, weight, b, a, a_log, dt_bias, z, cu) -> tuple[torch.Tensor, ...]:
    """Results of the three operations of a trainer."""
    qkv = kernels.causal_conv1d(x, weight, cu)
    o = kernels.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu)
    return qkv, o, kernels.gated_rms_norm(o, z, normal(128, seed=5), EPS)


class Rollout:
    """States of all requests in scattered slots, other slots and their paddings NaN, whose bits must stay."""

    def __init__(self, requests: int, strided: bool) -> None:
        self.slots = torch.randperm(2 * requests, generator=torch.Generator().manual_seed(4))[:requests]
        shapes = (2 * requests, 3, COLUMNS), (2 * requests, HEADS, 128, 128)
        pages = [torch.full((2 * requests, shape[1:].numel() + 64), torch.nan) for shape in map(torch.Size, shapes)]
        conv, state = (page[:, 32:-32].view(shape) for page, shape in zip(pages, shapes, strict=True))
        self.conv, self.state = conv.bfloat16(), state
        if strided:  # channels first, and values' features first
            self.conv = torch.full((2 * requests, COLUMNS, 3), torch.nan).bfloat16().mT
            self.state = state.mT

    def step(self, chunks: list[tuple[int, slice, int]], values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One step of (request, its new tokens in the trainer's batch or a padding, tokens computed before)."""
        x, weight, b, a, a_log, dt_bias, z = values
        rows = torch.cat([torch.arange(len(x))[span] for _, span, _ in chunks])
        x, b, a, z = (t[rows] for t in (x, b, a, z))
        numbers = [-1 if request < 0 else int(self.slots[request]) for request, _, _ in chunks]
        slots = torch.tensor(numbers, dtype=torch.int32)
        computed = torch.tensor([count for *_, count in chunks], dtype=torch.int32)
        cu = sequences(*(span.stop - span.start for _, span, _ in chunks))
        qkv = kernels.causal_conv1d_update(x, weight, self.conv, slots, computed, cu)
        o = kernels.gated_delta_rule_update(qkv, b, a, a_log, dt_bias, self.state, slots, computed, cu)
        return [qkv, o, kernels.gated_rms_norm(o, z, normal(128, seed=5), EPS)]


@pytest.mark.parametrize(("seed", "most", "strided"), [(0, 1, False), (1, 7, True), (2, 64, False), (3, 200, True)])
def test_every_cut_and_mixture_of_requests_has_the_trainers_bits(seed, most, strided):
    """Steps of a random half of the requests, each with at most ``most`` new tokens, among padded requests."""
    cu, generator = sequences(*LENGTHS), random.Random(seed)
    values = *inputs(int(cu[-1])), normal(int(cu[-1]), HEADS, 128, seed=6)
    with torch.no_grad():
        whole, rollout, done = layer(*values, cu), Rollout(len(LENGTHS), strided), [0] * len(LENGTHS)
        while left := [r for r, length in enumerate(LENGTHS) if done[r] < length]:
            chunks = []
            for request in generator.sample(left, (len(left) + 1) // 2):
                first, count = int(cu[request]) + done[request], min(generator.randint(1, most), LENGTHS[request])
                stop = min(first + count, int(cu[request + 1]))
                chunks += [(request, slice(first, stop), done[request]), (-1, slice(0, generator.randint(0, 2)), 3)]
                done[request] += stop - first
            parts = [result.split([span.stop - span.start for _, span, _ in chunks]) for result in
                     rollout.step(chunks, values)]  # fmt: skip
            for number, (request, span, _) in enumerate(chunks):
                for part, want in zip(parts, whole, strict=True):
                    assert torch.equal(part[number], want[span] if request >= 0 else torch.zeros_like(want[span]))
    unused = torch.ones(len(rollout.state), dtype=torch.bool).index_fill_(0, rollout.slots, False)
    assert rollout.state[unused].isnan().all() and rollout.conv[unused].isnan().all()
    assert rollout.state[~unused].isfinite().all() and rollout.conv[~unused].isfinite().all()


def test_bits_depend_neither_on_other_sequences_nor_on_threads_nor_on_nan_in_them():
    cu = sequences(*LENGTHS)
    values = *inputs(int(cu[-1])), normal(int(cu[-1]), HEADS, 128, seed=6)
    x, weight, b, a, *heads, z = values
    with torch.no_grad():
        whole = layer(*values, cu)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1 if threads > 1 else 3)
            assert all(map(torch.equal, layer(*values, cu), whole))
        finally:
            torch.set_num_threads(threads)
        for first, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            span = slice(first, stop)
            alone = layer(x[span], weight, b[span], a[span], *heads, z[span], sequences(stop - first))
            assert all(torch.equal(part, want[span]) for part, want in zip(alone, whole, strict=True))
        spoiled = x.clone()
        spoiled[140] = torch.nan  # in the fourth sequence
        for part, want in zip(layer(spoiled, *values[1:], cu), whole, strict=True):
            rows = torch.arange(len(x))
            assert part[140].isnan().all()
            assert torch.equal(part[(rows < 140) | (rows >= 198)], want[(rows < 140) | (rows >= 198)])


@pytest.mark.parametrize("function", [delta_net.sigmoid, delta_net.l2norm, lambda x: delta_net.tree_sum(x, -1)])
def test_elementary_steps_do_not_depend_on_the_number_of_rows(function):
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0)) * 4
    whole = function(x)
    for count in [*range(1, 34), 100]:
        assert torch.equal(function(x[7 : 7 + count].clone()), whole[7 : 7 + count])


def test_the_layer_is_transformers():
    """Their layer in FP32, except for what the contract rounds to BF16: the operations' inputs and outputs."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=256, linear_num_key_heads=KEYS, linear_num_value_heads=HEADS, linear_key_head_dim=128,
        linear_value_head_dim=128, hidden_act="silu",
    )  # fmt: skip
    stock = Qwen3_5GatedDeltaNet(config, 0)
    x, qkv, o = torch.randn(1, 130, 256), [], []
    for name in ("conv1d", "A_log", "dt_bias", "norm"):
        for parameter in (getattr(stock, name),) if name[0] in "Ad" else getattr(stock, name).parameters():
            parameter.data = parameter.data.bfloat16().float()
    for name in ("in_proj_qkv", "in_proj_z"):
        getattr(stock, name).register_forward_hook(lambda *call: call[-1].bfloat16().float())
    stock.out_proj.register_forward_pre_hook(lambda _, args: o.append(args[0]))
    with torch.no_grad():
        stock(x)
        qkv, z = (getattr(stock, name)(x)[0].bfloat16() for name in ("in_proj_qkv", "in_proj_z"))
        b, a, cu = stock.in_proj_b(x)[0], stock.in_proj_a(x)[0], sequences(130)
        conv = kernels.causal_conv1d(qkv, stock.conv1d.weight.squeeze(1), cu)
        ours = kernels.gated_delta_rule(conv, b, a, stock.A_log, stock.dt_bias, cu)
        ours = kernels.gated_rms_norm(ours, z.unflatten(1, (-1, 128)), stock.norm.weight, stock.layer_norm_epsilon)
    want = o[0][0]
    assert (ours.float() - want).norm() <= 2**-7 * want.norm()


# --- gradients --------------------------------------------------------------------------------------------------------


def by_formula(x, weight, b, a, a_log, dt_bias, z, norm_weight, cu):
    """The three operations in float64 for autograd, token by token."""
    results = []
    for first, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        padded = F.pad(x[first:stop], (0, 0, 3, 0))
        qkv = F.silu(sum(padded[tap : tap + stop - first] * weight[:, tap] for tap in range(4)))
        q, k, v = (heads.unflatten(1, (-1, 128)) for heads in qkv.split([KEYS * 128, KEYS * 128, HEADS * 128], 1))
        q, k = (u * (u.square().sum(-1, keepdim=True) + EPS).rsqrt() for u in (q, k))
        q, k = (u.repeat_interleave(HEADS // KEYS, dim=1) for u in (q * 128**-0.5, k))
        results.append(recurrence(q, k, v, -a_log.exp() * F.softplus(a + dt_bias)[first:stop], b[first:stop].sigmoid()))
    o = torch.cat(results)
    return (o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_weight * F.silu(z)).flatten(1)


def recurrence(q, k, v, g, beta):
    state, outputs = q.new_zeros(q.shape[1], 128, 128), []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None, None]
        delta = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * beta[token][:, None]
        state = state + k[token][:, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [(300,), (130, 1, 0, 64, 65)])
def test_the_gradient_of_the_rule_by_chunks_has_fp32_accuracy(lengths):
    """Heads that hardly forget, that forget, and that forget at once."""
    cu, tokens = sequences(*lengths), sum(lengths)
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, do = (torch.randn(tokens, 3, 128, generator=generator) for _ in range(4))
    q, k = F.normalize(q, dim=-1) * 128**-0.5, F.normalize(k, dim=-1)
    g, beta = (torch.rand(tokens, 3, generator=generator) for _ in range(2))
    values = q, k, v, g * torch.tensor([-1e-4, -1.0, -30.0]), beta
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in values]
        if dtype == torch.float32:
            o = rule.rule_by_chunks(*leaves, cu)
        else:
            parts = zip(*(x.split(lengths) for x in leaves), strict=True)
            o = torch.cat([recurrence(*part) for part in parts if len(part[0])])
        gradients.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))])
    for got, want in zip(*gradients, strict=True):
        error = (got - want).transpose(0, 1).flatten(1).norm(dim=1) / want.transpose(0, 1).flatten(1).norm(dim=1)
        assert error.max() <= 1e-6, error


@pytest.mark.parametrize("bytes_at_once", [2**27, 1])
def test_gradients_of_the_layer(monkeypatch, bytes_at_once):
    """All heads at once and head by head, against float64; each tensor in its own type."""
    monkeypatch.setattr(rule, "_STATE_BYTES", bytes_at_once)
    cu = sequences(70, 3, 66)
    values = *inputs(139), normal(139, HEADS, 128, seed=6), normal(128, seed=5)
    leaves, exact = [[x.clone().to(d or x.dtype).requires_grad_() for x in values] for d in (None, torch.float64)]
    qkv = kernels.causal_conv1d(*leaves[:2], cu)
    y = kernels.gated_rms_norm(kernels.gated_delta_rule(qkv, *leaves[2:6], cu), *leaves[6:], EPS)
    want, dy = by_formula(*exact, cu), normal(*y.shape, seed=9)
    y.backward(dy)
    want.backward(dy.double())
    assert (y.double() - want).norm() <= 2**-7 * want.norm()
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double() - exact_leaf.grad).norm() <= 2**-6 * exact_leaf.grad.norm()


def test_gradients_do_not_leak_into_other_sequences():
    cu = sequences(66, 70)
    values = *inputs(136), normal(136, HEADS, 128, seed=6)
    leaves = [x.clone().requires_grad_() for x in values]
    with torch.no_grad():
        leaves[0][:66] = torch.nan
    layer(*leaves, cu)[2][66:].float().sum().backward()
    whole = [x.grad[66:] for x in (leaves[0], leaves[2], leaves[3], leaves[6])]
    alone = [x[66:].clone().requires_grad_() if len(x) == 136 else x for x in values]
    layer(*alone, sequences(70))[2].float().sum().backward()
    for got, want in zip(whole, (alone[0], alone[2], alone[3], alone[6]), strict=True):
        assert torch.isfinite(got).all() and (got.float() - want.grad.float()).norm() <= 1e-5 * want.grad.float().norm()


# --- quantized and refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule_name", ["fp32", "pow2"])
def test_the_quantizing_norm_is_the_norm_then_the_quantizer(rule_name):
    o, merged, weight = normal(9, HEADS, 128), normal(9, HEADS * 128 + 64), normal(128, seed=5)
    z = merged[:, 64:].unflatten(1, (-1, 128))
    want = kernels.quantize_1x128(kernels.gated_rms_norm(o, z, weight, EPS), rule_name)
    for grad, with_normed in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            got = kernels.gated_rms_norm_quantize_1x128(o, z, weight, EPS, rule_name, with_normed=with_normed)
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(got.scales, want.scales) and (got.source is not None) == with_normed


def test_operands_that_do_not_fit_raise():
    x, weight, b, a, a_log, dt_bias = inputs(5)
    states = torch.zeros(3, HEADS, 128, 128), torch.zeros(3, 3, COLUMNS).bfloat16()
    cu, slots = sequences(5), torch.zeros(1, dtype=torch.int32)
    for call, error, sentence in (
        (lambda: kernels.causal_conv1d(x, weight[:, :3], cu), ValueError, "weight has shape"),
        (lambda: kernels.gated_delta_rule(x[:, 128:], b, a, a_log, dt_bias, cu), ValueError, "1024|896 columns"),
        (lambda: kernels.gated_delta_rule(x, b.bfloat16(), a, a_log, dt_bias, cu), TypeError, "b is torch.bfloat16"),
        (lambda: kernels.causal_conv1d_update(x, weight, states[1], slots, slots, slots), ValueError, "cu_seqlens"),
        (
            lambda: kernels.gated_delta_rule_update(x, b, a, a_log, dt_bias, states[0][:, :1], slots, slots, cu),
            ValueError,
            "states has shape",
        ),
    ):
        with pytest.raises(error, match=sentence):
            call()

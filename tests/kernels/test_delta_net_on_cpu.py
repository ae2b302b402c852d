# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A gated delta net's operations on the CPU: equal bits wherever a sequence is cut, values, gradients."""

import random

import pytest
import torch
import torch.nn.functional as F
from tensors import normal, packed
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from jetrl_verl import kernels
from jetrl_verl.kernels import gated_delta_rule_gradient as gradient
from jetrl_verl.reference import delta_net

LENGTHS = (131, 1, 2, 64, 3, 70)
KEYS, HEADS, EPS = 2, 4, 1e-6
COLUMNS = (2 * KEYS + HEADS) * 128


def inputs(tokens: int) -> list[torch.Tensor]:
    """x, b, a, z, taps, A_log, dt_bias, weight; the first head hardly forgets, the last one forgets at once."""
    b, a = (normal(tokens, HEADS, seed=seed).float() * 2 for seed in (1, 2))
    a_log, dt_bias = torch.tensor([-6.0, 0.1, 1.7, 2.77]), torch.tensor([-4.0, 0.3, 1.0, 25.0])
    z, taps = normal(tokens, HEADS, 128, seed=6), normal(COLUMNS, 4, seed=3) / 2
    return [normal(tokens, COLUMNS), b, a, z, taps, a_log, dt_bias, normal(128, seed=5)]


def layer(x, b, a, z, taps, a_log, dt_bias, weight, cu) -> tuple[torch.Tensor, ...]:
    """Results of a trainer's three operations."""
    qkv = kernels.causal_conv1d(x, taps, cu)
    o = kernels.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu)
    return qkv, o, kernels.gated_rms_norm(o, z, weight, EPS)


def check_cuts(seed: int, most: int, strided: bool, device: str = "cpu", lengths: tuple[int, ...] = LENGTHS) -> None:
    """Steps of a random half of the requests, at most ``most`` new tokens each, next to padded requests. States begin
    as NaN in scattered slots; slots of others keep it."""
    cu, generator, done = packed(*lengths), random.Random(seed), [0] * len(lengths)
    tokens, of_model = (values := [x.to(device) for x in inputs(int(cu[-1]))])[:4], values[4:]
    taps, a_log, dt_bias, weight = of_model
    pages = len(lengths) + 6
    slots = generator.sample(range(pages), len(lengths))
    conv = torch.full((pages, COLUMNS, 3), torch.nan).bfloat16().mT
    state = torch.full((pages, HEADS, 195 if strided else 193, 128), torch.nan)
    if strided:  # a page holds more than the state
        state = state[:, :, :193]
    else:
        conv = conv.contiguous()
    conv, state = conv.to(device), state.to(device)
    with torch.no_grad():
        whole = layer(*values, cu.to(device))
        while left := [request for request, length in enumerate(lengths) if done[request] < length]:
            step = []  # first token, stop, tokens before, slot
            for request in generator.sample(left, (len(left) + 1) // 2):
                start = int(cu[request]) + done[request]
                stop = min(start + generator.randint(1, most), int(cu[request + 1]))
                step += [(start, stop, done[request], slots[request]), (0, generator.randint(0, 2), 3, -1)]
                done[request] += stop - start
            spans = [slice(*part[:2]) for part in step]
            x, b, a, z = (torch.cat([t[span] for span in spans]) for t in tokens)
            computed, at = (torch.tensor([part[i] for part in step], dtype=torch.int32) for i in (2, 3))
            places = [x.to(device) for x in (at, computed, packed(*(part[1] - part[0] for part in step)))]
            qkv = kernels.causal_conv1d_update(x, taps, conv, *places)
            kernels.gated_delta_rule_update(qkv, b, a, a_log, dt_bias, state, *places, o := torch.empty_like(z))
            for got, want in zip((qkv, o, kernels.gated_rms_norm(o, z, weight, EPS)), whole, strict=True):
                parts = [want[span] if part[3] >= 0 else 0 * want[span] for span, part in zip(spans, step, strict=True)]
                assert torch.equal(got, torch.cat(parts))
    assert all(conv[slot].isfinite().all() for slot in slots)
    for slot, length in zip(slots, lengths, strict=True):
        upper, _, *rows = delta_net.state_of(state[slot])
        assert length < 64 or upper.isfinite().all()
        assert all(part[:, : length % 64].isfinite().all() for part in rows)
    for states in (conv, state):
        assert all(states[slot].isnan().all() for slot in range(pages) if slot not in slots)


@pytest.mark.parametrize(("seed", "most", "strided"), [(0, 1, False), (1, 7, True), (2, 64, False), (3, 200, True)])
def test_every_cut_and_mixture_of_requests_has_the_trainers_bits(seed, most, strided):
    check_cuts(seed, most, strided)


def check_sequences_alone(device: str = "cpu", lengths: tuple[int, ...] = LENGTHS) -> None:
    cu = packed(*lengths)
    values = [x.to(device) for x in inputs(int(cu[-1]))]
    with torch.no_grad():
        whole = layer(*values, cu.to(device))
        for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            alone = layer(*(t[start:stop] for t in values[:4]), *values[4:], packed(stop - start).to(device))
            assert all(torch.equal(part, want[start:stop]) for part, want in zip(alone, whole, strict=True))
        values[0][170] = torch.nan  # in the fourth sequence
        others = torch.arange(int(cu[-1]))[[*range(170), *range(198, int(cu[-1]))]]
        for got, want in zip(layer(*values, cu.to(device)), whole, strict=True):
            assert got[170].isnan().all() and torch.equal(got[others], want[others])


def test_a_token_depends_on_no_other_sequence_and_no_later_token():
    check_sequences_alone()


def test_halves_of_a_state_are_exact_but_above_half_of_an_even_number():
    bits = torch.tensor([0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0, -(2**31)])
    s = torch.cat([bits.int().view(torch.float32), normal(4096).float() * 1.1])
    upper, lower = delta_net.split_state(s)
    assert torch.equal(upper, s.bfloat16())
    halfway = (s.view(torch.int32) & 0x1FFFF) == 0x8000
    joined = delta_net.join_state(upper, lower).view(torch.int32)
    assert halfway[1] and torch.equal(joined, s.view(torch.int32) - halfway.int())
    assert delta_net.join_state(*delta_net.split_state(torch.tensor(torch.nan))).isnan()


def test_the_layer_is_transformers():
    """Their layer in FP32 with BF16 inputs of the operations."""
    torch.manual_seed(0)
    heads = dict(linear_num_key_heads=KEYS, linear_num_value_heads=HEADS)
    stock = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=256, **heads), 0).bfloat16().float()
    for name in ("in_proj_qkv", "in_proj_z"):
        getattr(stock, name).register_forward_hook(lambda *call: call[-1].bfloat16().float())
    normed = []
    stock.out_proj.register_forward_pre_hook(lambda _, args: normed.append(args[0][0]))
    with torch.no_grad():
        stock(x := torch.randn(1, 130, 256))
        qkv, z, b, a = (getattr(stock, f"in_proj_{name}")(x)[0] for name in ("qkv", "z", "b", "a"))
        of_model = stock.conv1d.weight.squeeze(1), stock.A_log, stock.dt_bias, stock.norm.weight
        got = layer(qkv.bfloat16(), b, a, z.bfloat16().unflatten(1, (-1, 128)), *of_model, packed(130))[2]
    assert (got.float() - normed[0]).norm() <= 2**-7 * normed[0].norm()


def recurrence(q, k, v, g, beta):
    state, outputs = q.new_zeros(q.shape[1], 128, 128), []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None, None]
        delta = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * beta[token][:, None]
        state = state + k[token][:, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs)


def by_formula(x, b, a, z, taps, a_log, dt_bias, weight):
    """The layer on one sequence, for autograd."""
    padded = F.pad(x, (0, 0, 3, 0))
    qkv = F.silu(sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(4)))
    q, k, v = (part.unflatten(1, (-1, 128)) for part in qkv.split([KEYS * 128, KEYS * 128, HEADS * 128], 1))
    q, k = (part * (part.square().sum(-1, keepdim=True) + EPS).rsqrt() for part in (q, k))
    q, k = (part.repeat_interleave(HEADS // KEYS, dim=1) for part in (q * 128**-0.5, k))
    o = recurrence(q, k, v, -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid())
    return (o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight * F.silu(z)).flatten(1)


def check_accuracy(device: str = "cpu") -> None:
    """Of each head, q, k, u, S and o rounded to BF16."""
    x, b, a, _, taps, a_log, dt_bias, _ = inputs(tokens := 640)
    with torch.no_grad():
        qkv = kernels.causal_conv1d(x, taps, packed(tokens))
        states, at = torch.full((1, HEADS, 193, 128), torch.nan), torch.zeros(1, dtype=torch.int32)
        call = [t.to(device) for t in (qkv, b, a, a_log, dt_bias, states, at, at, packed(tokens))]
        kernels.gated_delta_rule_update(*call, o := torch.empty(tokens, HEADS, 128, dtype=qkv.dtype, device=device))
    q, k, v = (part.unflatten(1, (-1, 128)).double() for part in qkv.split([KEYS * 128, KEYS * 128, HEADS * 128], 1))
    q, k = (F.normalize(part, dim=-1).repeat_interleave(HEADS // KEYS, dim=1) for part in (q, k))
    g = -a_log.bfloat16().double().exp() * F.softplus(a.double() + dt_bias.bfloat16().double())
    want = recurrence(q * 128**-0.5, k, v, g, b.double().sigmoid())
    error = (o.cpu().double() - want).square().mean((0, 2)) / want.square().mean((0, 2))
    assert (error.sqrt() <= 5e-3).all(), error.sqrt()


def test_the_rule_has_the_recurrences_values():
    check_accuracy()


@pytest.mark.parametrize("lengths", [(300,), (130, 1, 0, 64, 65)])
def test_the_gradient_of_the_rule_by_chunks_has_fp32_accuracy(lengths):
    """Heads that hardly forget, that forget, and that forget at once."""
    generator = torch.Generator().manual_seed(len(lengths))
    q, k, v, do = (torch.randn(sum(lengths), 3, 128, generator=generator) for _ in range(4))
    g, beta = (torch.rand(sum(lengths), 3, generator=generator) for _ in range(2))
    values = F.normalize(q, dim=-1) / 8, F.normalize(k, dim=-1), v, g * torch.tensor([-1e-4, -1.0, -30.0]), beta
    exact = [x.double().requires_grad_() for x in values]
    got = gradient.rule_gradients(do, *values, packed(*lengths))
    parts = [part for part in zip(*(x.split(lengths) for x in exact), strict=True) if len(part[0])]
    want = torch.cat([recurrence(*part) for part in parts])
    for x, y in zip(got, torch.autograd.grad(want, exact, do.double()), strict=True):
        by_head = [t.detach().transpose(0, 1).flatten(1) for t in (x - y, y)]
        assert (by_head[0].norm(dim=1) <= 1e-6 * by_head[1].norm(dim=1)).all()


@pytest.mark.parametrize("bytes_at_once", [2**27, 1])
def test_gradients_of_the_layer(monkeypatch, bytes_at_once):
    """Heads at once, and one by one under autocast. NaN in the first sequence reaches no other one."""
    monkeypatch.setattr(gradient, "_STATE_BYTES", bytes_at_once)
    values, lengths, dy = inputs(139), [70, 3, 66], normal(139, HEADS * 128, seed=9)
    leaves, exact = (
        [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in values] for dtype in (None, torch.double)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=bytes_at_once == 1):
        layer(*leaves, packed(*lengths))[2].backward(dy)
    parts = zip(*(x.split(lengths) for x in exact[:4]), strict=True)
    torch.cat([by_formula(*part, *exact[4:]) for part in parts]).backward(dy.double())
    for leaf, want in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype and (leaf.grad.double() - want.grad).norm() <= 2**-6 * want.grad.norm()
    gradients = [leaf.grad for leaf in leaves[:4]]
    spoiled = [x.clone().requires_grad_() for x in (values[0].index_fill(0, torch.arange(70), torch.nan), *values[1:])]
    layer(*spoiled, packed(*lengths))[2].backward(dy)
    for leaf, want in zip(spoiled, gradients, strict=False):
        assert (leaf.grad[70:].float() - want[70:].float()).norm() <= 1e-6 * want[70:].float().norm()


def test_heads_that_do_not_fit_raise():
    x, b, a, _, _, *of_heads, _ = inputs(5)
    with pytest.raises(ValueError, match="896 columns are not query, key and 4 value heads of 128"):
        kernels.gated_delta_rule(x[:, 128:], b, a, *of_heads, packed(5))

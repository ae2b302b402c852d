# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net's kernels on a GPU: one arithmetic wherever a sequence is cut, values and gradients."""

import pytest
import torch
from test_delta_net_on_cpu import (
    EPS,
    HEADS,
    by_formula,
    check_cuts,
    check_sequences_alone,
    inputs,
    layer,
    normal,
    sequences,
)

from jetrl_verl import kernels

LENGTHS = (131, 1, 2, 64, 3, 700)


@pytest.mark.parametrize(
    ("seed", "most", "strided"), [(0, 1, False), (1, 1, True), (2, 7, True), (3, 64, False), (4, 900, True)]
)
def test_every_cut_and_mixture_of_requests_has_the_trainers_bits(seed, most, strided):
    check_cuts(seed, most, strided, "cuda", LENGTHS)


@pytest.mark.parametrize("more", [0, 90])
def test_a_sequence_depends_on_no_other_one(more):
    """Few and many heads are computed in tiles of different sizes."""
    check_sequences_alone("cuda", (131, 1, 2, 64, *(3,) * more))


@pytest.mark.parametrize(("strided", "requests"), [(False, 1), (True, 33)])
def test_a_captured_decode_step_writes_zeros_for_padded_requests_and_no_state(strided, requests):
    """Slots change between replays; NaN in padded rows and in slots that are not read."""
    slots = torch.full((requests,), -1, dtype=torch.int32, device="cuda")
    computed = torch.zeros(requests, dtype=torch.int32, device="cuda")
    x, b, a, _, taps, a_log, dt_bias, _ = (t.cuda() for t in inputs(requests))
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    states = torch.full((2 * requests, HEADS, 128, 128), torch.nan, device="cuda")
    past = torch.full((2 * requests, 3, x.shape[1]), torch.nan, device="cuda").bfloat16()
    if strided:
        states, past = states.mT.contiguous().mT, past.mT.contiguous().mT

    def step() -> torch.Tensor:
        qkv = kernels.causal_conv1d_update(x, taps, past, slots, computed, cu)
        return kernels.gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu)

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        graph.replay()
        assert (got == 0).all() and states.isnan().all() and past.isnan().all()
        live = (requests + 1) // 2
        slots[:live] = torch.arange(live, dtype=torch.int32, device="cuda").flip(0) + requests
        x[live:] = torch.nan
        for tokens in range(3):
            computed.fill_(tokens)
            graph.replay()
            assert got[:live].isfinite().all() and (got[live:] == 0).all()
        assert states[requests : requests + live].isfinite().all() and past[requests : requests + live].isfinite().all()
        assert states[:requests].isnan().all() and past[:requests].isnan().all()


def test_values_and_gradients():
    values = inputs(139)
    leaves, exact = [x.cuda().requires_grad_() for x in values], [x.double().requires_grad_() for x in values]
    y, want = layer(*leaves, sequences(139).cuda())[2], by_formula(*exact)
    dy = normal(*y.shape, seed=9)
    y.backward(dy.cuda())
    want.backward(dy.double())
    assert (y.double().cpu() - want).norm() <= 2**-7 * want.norm()
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double().cpu() - exact_leaf.grad).norm() <= 2**-6 * exact_leaf.grad.norm()


def test_states_have_fp32_accuracy():
    """Against the CPU's recurrence, over 700 tokens of heads that forget nothing to everything."""
    cu, (x, b, a, _, taps, a_log, dt_bias, _) = sequences(700), (t.cuda() for t in inputs(700))
    states = torch.zeros(2, 1, HEADS, 128, 128)
    slots, computed = torch.zeros(2, dtype=torch.int32)
    qkv = kernels.causal_conv1d(x, taps, cu.cuda())
    for target, device in zip(states, ("cpu", "cuda"), strict=True):
        call = [t.to(device) for t in (qkv, b, a, a_log, dt_bias, target, slots[None], computed[None], cu)]
        kernels.gated_delta_rule_update(*call)
        target.copy_(call[5])
    want, got = states
    assert ((got - want).flatten(2).norm(dim=2) <= 1e-5 * want.flatten(2).norm(dim=2)).all()


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_the_quantizing_norm_is_the_norm_then_the_quantizer(tokens, rule):
    o, merged, weight = normal(tokens, 48, 128).cuda(), normal(tokens, 48 * 128 + 64).cuda(), normal(128).cuda()
    z = merged[:, 64:].unflatten(1, (-1, 128))
    want = kernels.quantize_1x128(kernels.gated_rms_norm(o, z, weight, EPS), rule)
    for with_normed in (True, False):
        got = kernels.gated_rms_norm_quantize(o, z, weight, EPS, rule, with_normed=with_normed)
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(got.scales, want.scales)
    whole = kernels.gated_rms_norm(o, z, weight, EPS)
    assert torch.equal(kernels.gated_rms_norm(o[:1], z[:1], weight, EPS), whole[:1])

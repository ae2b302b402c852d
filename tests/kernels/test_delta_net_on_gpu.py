# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net's kernels on a GPU: one arithmetic wherever a sequence is cut, values and gradients."""

import pytest
import torch
from backends import triton_kernels
from tensors import normal, packed
from test_delta_net_on_cpu import HEADS, by_formula, check_accuracy, check_cuts, check_sequences_alone, inputs, layer

from jetrl_verl import kernels
from jetrl_verl.kernels import gated_delta_rule_gradient as gradient
from jetrl_verl.reference import delta_net

LENGTHS = (131, 1, 2, 64, 3, 700)


@pytest.mark.parametrize(
    ("seed", "most", "strided"), [(0, 1, False), (1, 1, True), (2, 7, True), (3, 64, False), (4, 900, True)]
)
def test_every_cut_and_mixture_of_requests_has_the_trainers_bits(seed, most, strided):
    check_cuts(seed, most, strided, "cuda", LENGTHS)


@pytest.mark.parametrize("strided", [False, True])
def test_steps_of_many_and_of_few_requests_have_the_trainers_bits(strided):
    check_cuts(5, 3, strided, "cuda", (40, 1, 2, 30, 60, 90, *(17,) * 30))


@pytest.mark.parametrize(("keys", "heads"), [(16, 32), (16, 48)])
def test_decodes_of_a_models_size_have_the_trainers_bits(keys, heads):
    """Prompts, cut once, then a token of every request at a time, over two ends of chunks."""
    generator = torch.Generator("cuda").manual_seed(keys)
    requests, length = 40, 190
    qkv = torch.randn(requests, length, (2 * keys + heads) * 128, device="cuda", generator=generator).bfloat16()
    b, a = (torch.randn(requests, length, heads, device="cuda", generator=generator) for _ in range(2))
    of_model = [torch.randn(heads, device="cuda", generator=generator) for _ in range(2)]
    counts = torch.arange(requests, device="cuda", dtype=torch.int32) % 64 + 1  # tokens of a prompt
    slots = torch.randperm(requests, device="cuda", generator=generator).int()
    states = torch.full((requests, *delta_net.state_shape(heads)), torch.nan, device="cuda")
    with torch.no_grad():
        whole = kernels.gated_delta_rule(
            *(x.flatten(0, 1) for x in (qkv, b, a)), *of_model, packed(*(length,) * requests).cuda()
        ).unflatten(0, (requests, length))

        def step(first: torch.Tensor, count: torch.Tensor) -> None:
            tokens = torch.arange(length, device="cuda")
            rows = (tokens >= first[:, None]) & (tokens < (first + count)[:, None])
            cu = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
            out = torch.empty_like(whole[rows])
            kernels.gated_delta_rule_update(qkv[rows], b[rows], a[rows], *of_model, states, slots, first, cu, out)
            assert torch.equal(out, whole[rows])

        step(torch.zeros_like(counts), counts // 2)
        step(counts // 2, counts - counts // 2)
        for token in range(length - 64):
            step(counts + token, torch.ones_like(counts))


@pytest.mark.parametrize("more", [(), (3,) * 10, (3,) * 90, (1,) * 90])
def test_a_sequence_depends_on_no_other_one(more):
    """Of few sequences two blocks share a head's values."""
    check_sequences_alone("cuda", (131, 1, 2, 64, *more))


@pytest.mark.parametrize(("strided", "requests"), [(False, 1), (True, 33)])
def test_a_captured_decode_step_writes_zeros_for_padded_requests_and_no_state(strided, requests):
    """Slots change between replays; NaN in padded rows and in slots that are not read."""
    slots = torch.full((requests,), -1, dtype=torch.int32, device="cuda")
    computed = torch.zeros(requests, dtype=torch.int32, device="cuda")
    x, b, a, _, taps, a_log, dt_bias, _ = (t.cuda() for t in inputs(requests))
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    states = torch.full((2 * requests, HEADS, 193, 128), torch.nan, device="cuda")
    past = torch.full((2 * requests, 3, x.shape[1]), torch.nan, device="cuda").bfloat16()
    if strided:
        states, past = torch.cat([states, states], dim=1)[:, :HEADS], past.mT.contiguous().mT

    def step() -> torch.Tensor:
        qkv = kernels.causal_conv1d_update(x, taps, past, slots, computed, cu)
        out = qkv.new_empty(*b.shape, 128)
        kernels.gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu, out)
        return out

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
        rows = delta_net.state_of(states[requests : requests + live])[2:]
        assert all(part[:, :, :3].isfinite().all() for part in rows)
        assert all(part[:, :, 3:].view(torch.float32).isnan().all() for part in rows)
        assert past[requests : requests + live].isfinite().all()
        assert states[:requests].isnan().all() and past[:requests].isnan().all()


def test_values_and_gradients():
    values = inputs(139)
    leaves, exact = [x.cuda().requires_grad_() for x in values], [x.double().requires_grad_() for x in values]
    y, want = layer(*leaves, packed(139).cuda())[2], by_formula(*exact)
    dy = normal(*y.shape, seed=9)
    y.backward(dy.cuda())
    want.backward(dy.double())
    assert (y.double().cpu() - want).norm() <= 2**-7 * want.norm()
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double().cpu() - exact_leaf.grad).norm() <= 2**-6 * exact_leaf.grad.norm()


def test_the_rule_has_the_recurrences_values():
    check_accuracy("cuda")


def test_the_rule_is_the_references():
    """Outputs and states, over 300 tokens of heads that forget nothing to everything."""
    cu, (x, b, a, _, taps, a_log, dt_bias, _) = packed(300), inputs(300)
    states, at = torch.zeros(2, 1, HEADS, 193, 128), torch.zeros(1, dtype=torch.int32)
    qkv, outputs = kernels.causal_conv1d(x, taps, cu), []
    for target, device in zip(states, ("cpu", "cuda"), strict=True):
        out = torch.empty(300, HEADS, 128, dtype=qkv.dtype, device=device)
        call = [t.to(device) for t in (qkv, b, a, a_log, dt_bias, target, at, at, cu, out)]
        kernels.gated_delta_rule_update(*call)
        target.copy_(call[5])
        outputs.append(out.cpu())
    upper, _, *rows = zip(*map(delta_net.state_of, states), strict=True)
    for want, got in [outputs, upper, *([x[:, :, : 300 % 64] for x in part] for part in rows)]:
        assert (got.float() - want.float()).norm() <= 2**-7 * want.float().norm()


# --- gradients of the rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(700,), (130, 1, 64, 500)])
def test_gradients_match_those_of_the_cpu(lengths):
    """Heads that hardly forget and that forget; products round their operands to BF16."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    qkv, do = (torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in ((8 * 128,), (4, 128)))
    b, a = (torch.randn(tokens, 4, generator=generator) for _ in range(2))
    call = do, qkv, b, a, torch.tensor([-6.0, -1.0, 0.1, 1.7]), torch.tensor([-4.0, -1.0, 0.3, 1.0])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    want = gradient.chunk_gradients(*call, cu_seqlens)
    got = triton_kernels.gated_delta_rule_backward(*(x.cuda() for x in call), cu_seqlens.cuda())
    for x, y in zip(got, want, strict=True):
        assert (x.cpu().float() - y).norm() <= 2**-7 * y.norm()


def test_autograd_takes_little_memory():
    """Rounded results of the operator's own types; a training step's sizes in the memory of a few states."""
    qkv = torch.randn(4096, 64 * 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b, a = (torch.randn(4096, 32, device="cuda", requires_grad=True) for _ in range(2))
    heads = [torch.randn(32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    cu_seqlens = torch.tensor([0, 1000, 4096], device="cuda", dtype=torch.int32)
    o = kernels.gated_delta_rule(qkv, b, a, *heads, cu_seqlens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o.backward(torch.randn_like(o))
    assert torch.cuda.max_memory_allocated() - before < 2**29
    for x in (qkv, b, a, *heads):
        assert x.grad.dtype == x.dtype and x.grad.isfinite().all()


def test_gradients_by_triton_have_equal_bits_in_every_run_and_packing():
    qkv, do = (torch.randn(700, *shape, device="cuda").bfloat16() for shape in ((8 * 128,), (4, 128)))
    b, a = (torch.randn(700, 4, device="cuda") for _ in range(2))
    heads = [torch.randn(4, device="cuda") for _ in range(2)]
    begin, middle, end = (torch.tensor([place], device="cuda", dtype=torch.int32) for place in (0, 130, 700))
    gradients = triton_kernels.gated_delta_rule_backward
    packed = [gradients(do, qkv, b, a, *heads, torch.cat([begin, middle, end])) for _ in range(3)]
    alone = gradients(*(x[130:] for x in (do, qkv, b, a)), *heads, torch.cat([begin, end - middle]))
    for first, second, third, last in zip(*packed, alone, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)
        assert first.ndim == 1 or torch.equal(first[130:], last)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule on a GPU, by Triton kernels and by flash-linear-attention."""

import sys

import pytest
import torch
from backends import triton_kernels

from jetrl_verl import kernels
from jetrl_verl.kernels import gated_delta_rule_gradient as gradient

rule = sys.modules["jetrl_verl.kernels.gated_delta_rule"]  # the package's attribute is the function
FLA = pytest.param("fla", 2**-5, marks=pytest.mark.skipif(rule._fla_rule() is None, reason="no gradient of fla-core"))


@pytest.mark.parametrize("lengths", [(700,), (130, 1, 64, 500)])
@pytest.mark.parametrize(("name", "error"), [("triton", 2**-7), FLA])
def test_gradients_match_those_of_the_cpu(lengths, name, error):
    """Heads that hardly forget and that forget; products round their operands to BF16."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    qkv, do = (torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in ((8 * 128,), (4, 128)))
    b, a = (torch.randn(tokens, 4, generator=generator) for _ in range(2))
    call = do, qkv, b, a, torch.tensor([-6.0, -1.0, 0.1, 1.7]), torch.tensor([-4.0, -1.0, 0.3, 1.0])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    want = gradient.chunk_gradients(*call, cu_seqlens)
    run = rule.fla_gradients if name == "fla" else triton_kernels.gated_delta_rule_backward
    got = run(*(x.cuda() for x in call), cu_seqlens.cuda())
    for x, y in zip(got, want, strict=True):
        assert (x.cpu().float() - y).norm() <= error * y.norm()


def test_autograd_calls_fla_where_it_is_installed(monkeypatch):
    """Rounded results of the operator's own types; a training step's sizes in the memory of a few states."""
    qkv = torch.randn(4096, 64 * 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b, a = (torch.randn(4096, 32, device="cuda", requires_grad=True) for _ in range(2))
    heads = [torch.randn(32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    cu_seqlens = torch.tensor([0, 1000, 4096], device="cuda", dtype=torch.int32)
    called, name = [], "gated_delta_rule_backward" if rule._fla_rule() is None else "fla_gradients"
    stock = getattr(rule, name)
    monkeypatch.setattr(rule, name, lambda *call: called.append(name) or stock(*call))
    o = kernels.gated_delta_rule(qkv, b, a, *heads, cu_seqlens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o.backward(torch.randn_like(o))
    most = 6 * 2**30 if name == "fla_gradients" else 2**29
    assert called == [name] and torch.cuda.max_memory_allocated() - before < most
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

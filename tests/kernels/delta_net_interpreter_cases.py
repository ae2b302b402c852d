# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net's Triton kernels under the interpreter (test_interpreted_on_cpu.py), which truncates to BF16."""

from contextlib import ExitStack

import pytest
import torch
from backends import triton_kernels
from slow import slow
from test_delta_net_on_cpu import EPS, HEADS, by_formula, check_cuts, inputs, layer, normal, rule, sequences

from jetrl_verl import kernels

NAMES = ["causal_conv1d", "gated_delta_rule", "gated_rms_norm"]
NAMES += ["causal_conv1d_update", "gated_delta_rule_update", "causal_conv1d_backward", "gated_rms_norm_backward"]


@pytest.fixture(autouse=True)
def _by_triton():
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(kernels.override_backend(name, "triton"))
        yield


@pytest.mark.parametrize("strided", [False, slow(True)])
def test_every_cut_has_the_bits_of_whole_sequences(strided):
    """Norms and gates of the sequences in a launch of their own, of the steps in the rule's."""
    check_cuts(1, 4, strided, lengths=(3, 1, 8))


def test_values_and_gradients():
    values = inputs(19)
    leaves, exact = [[x.clone().to(d or x.dtype).requires_grad_() for x in values] for d in (None, torch.float64)]
    y, want = layer(*leaves, sequences(19))[2], by_formula(*exact)
    dy = normal(*y.shape, seed=9)
    y.backward(dy)
    want.backward(dy.double())
    assert (y.double() - want).norm() <= 2**-6 * want.norm()
    for leaf, exact_leaf in ((leaves[i], exact[i]) for i in (0, 3, 4, 7)):  # x, z, taps, the norm's weight
        assert (leaf.grad.double() - exact_leaf.grad).norm() <= 2**-5 * exact_leaf.grad.norm()


def test_the_quantizing_norm_is_the_norm_then_the_quantizer():
    o, merged, weight = normal(9, HEADS, 128), normal(9, HEADS * 128 + 64), normal(128, seed=5)
    z = merged[:, 64:].unflatten(1, (-1, 128))
    normed, got = triton_kernels.gated_rms_norm_quantize(o, z, weight, EPS, "fp32", True)
    want = kernels.quantize_1x128(triton_kernels.gated_rms_norm(o, z, weight, EPS), "fp32")
    assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(got.scales, want.scales) and normed.shape == (9, HEADS * 128)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_states(reverse):
    generator = torch.Generator().manual_seed(0)
    matrices, added = (torch.randn(4, 2, 128, 128, generator=generator) / 16 for _ in range(2))
    resets = torch.tensor([True, False, True, False])
    got = rule.triton_scan(matrices.mT if reverse else matrices, added, resets, reverse)
    want = rule.torch_scan(*(x.double() for x in (matrices.mT if reverse else matrices, added)), resets, reverse)
    assert (got - want).norm() <= 1e-6 * want.norm()

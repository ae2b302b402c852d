# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net's Triton kernels under the interpreter (test_interpreted_on_cpu.py), which truncates to BF16."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from backends import triton_kernels
from slow import slow
from tensors import normal, packed
from test_delta_net_on_cpu import HEADS, by_formula, check_cuts, inputs, layer

from jetrl_verl import kernels
from jetrl_verl.kernels import gated_delta_rule_gradient as gradient

NAMES = ["causal_conv1d", "causal_conv1d_update", "causal_conv1d_backward", "gated_rms_norm", "gated_rms_norm_backward"]


@pytest.fixture(autouse=True)
def _by_triton():
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(kernels.override_backend(name, "triton"))
        yield


@pytest.mark.parametrize("strided", [False, slow(True)])
def test_every_cut_has_the_bits_of_whole_sequences(strided):
    check_cuts(1, 4, strided, lengths=(3, 1, 8))


def test_values_and_gradients():
    values = inputs(19)
    leaves, exact = [[x.clone().to(d or x.dtype).requires_grad_() for x in values] for d in (None, torch.float64)]
    y, want = layer(*leaves, packed(19))[2], by_formula(*exact)
    dy = normal(*y.shape, seed=9)
    y.backward(dy)
    want.backward(dy.double())
    assert (y.double() - want).norm() <= 2**-6 * want.norm()
    for leaf, exact_leaf in ((leaves[i], exact[i]) for i in (0, 3, 4, 7)):  # x, z, taps, the norm's weight
        assert (leaf.grad.double() - exact_leaf.grad).norm() <= 2**-5 * exact_leaf.grad.norm()


@pytest.mark.parametrize(
    ("lengths", "operands", "error"),
    [((1, 63, 0, 64), torch.float32, 2**-13), ((65, 130), torch.float32, 2**-13), ((2, 66), torch.bfloat16, 2**-5)],
)
def test_the_gradient_of_the_rule_by_chunks(lengths, operands, error):
    """The equations in FP32, as exact as decays of hundreds in FP32 are; with operands cut to BF16, as a GPU rounds
    them. Two value heads a key, one of which hardly forgets."""
    qkv, b, a, _, _, a_log, dt_bias, _ = inputs(sum(lengths))
    run = partial(triton_kernels.gated_delta_rule_backward, operands=operands)
    call, cu = (normal(len(qkv), HEADS, 128, seed=9), qkv, b, a, a_log, dt_bias), packed(*lengths)
    for x, y in zip(run(*call, cu), gradient.chunk_gradients(*call, cu), strict=True):
        assert (x.float() - y).norm() <= error * y.norm()
    last = lengths[-1]
    qkv[:-last] = torch.nan  # in the other sequences
    alone = run(*(x[-last:] for x in call[:4]), a_log, dt_bias, packed(last))
    for x, y in zip(run(*call, cu), alone, strict=True):
        assert x.ndim == 1 or torch.equal(x[-last:], y)

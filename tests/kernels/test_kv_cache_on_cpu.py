# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache on the CPU: attention in the trainer and over pages, and backward.

Results of the Triton kernels: operations_interpreter_cases.py.
"""

import sys

import pytest
import torch
from reference_operations import attention as exact_attention
from tensors import normal, packed
from torch.utils.checkpoint import checkpoint

from jetrl_verl import kernels, reference

SCALE = 128**-0.5


def dequantized(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_heads(reference.quantize_heads(x))


def test_attention_reads_quantized_keys_and_values():
    lengths = (5, 130, 1)
    cu = packed(*lengths)
    q, k, v = normal(136, 4, 128), normal(136, 2, 128, seed=1), normal(136, 2, 128, seed=2)
    k[:, :, 9] *= 100
    got = kernels.attention_fp8(q, k, v, cu, 130, SCALE)
    assert torch.equal(got, kernels.attention(q, dequantized(k), dequantized(v), cu, 130, SCALE))
    assert not torch.equal(got, kernels.attention(q, k, v, cu, 130, SCALE))


def test_quantized_keys_and_values_are_already_in_cache_form():
    """Every code under every scale, next to the head's maximum; so a cache needs no second form."""
    qdata = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = qdata[~qdata.float().isnan()].float()
    for exponent in (-63, -20, 0, 30):
        x = torch.zeros(len(finite), 1, 128)
        x[:, 0, 0], x[:, 0, 1] = finite, 256
        x = (x * 2.0**exponent).bfloat16()
        assert torch.equal(dequantized(x), x) and torch.equal(kernels.cache_form(x), x)


@pytest.mark.parametrize("keep_fp8", [True, False])
def test_gradients_are_straight_through_and_backward_saves_fp8(keep_fp8):
    """Without ``keep_fp8`` backward saves the dequantized keys and values."""
    lengths = (37, 64, 3)
    cu, tokens = packed(*lengths), sum(lengths)
    inputs = [normal(tokens, 4, 128), normal(tokens, 2, 128, seed=1), normal(tokens, 2, 128, seed=2)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = kernels.attention_fp8(*leaves, cu, max(lengths), SCALE, keep_fp8=keep_fp8)
    gradient = normal(*out.shape, seed=9)
    out.backward(gradient)
    exact = [x.double().requires_grad_() for x in (inputs[0], dequantized(inputs[1]), dequantized(inputs[2]))]
    exact_attention(*exact, cu, SCALE).backward(gradient.double())
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert (leaf.grad.double() - exact_leaf.grad).norm() <= 2**-8 * exact_leaf.grad.norm()
    of_keys = [x for x in saved if x.dtype in (torch.float8_e4m3fn, torch.uint8)]
    assert sum(x.numel() * x.itemsize for x in of_keys) == (2 * tokens * 2 * 129 if keep_fp8 else 0)
    of_bf16 = [x for x in saved if x.dtype == torch.bfloat16]
    expected = inputs[:1] if keep_fp8 else [inputs[0], dequantized(inputs[1]), dequantized(inputs[2])]
    assert all(torch.equal(a, b) for a, b in zip(of_bf16, expected, strict=True))


def test_a_forward_without_gradients_makes_no_fp8_data(monkeypatch):
    """As for old log-probabilities."""
    q, k, v = normal(20, 4, 128), normal(20, 2, 128, seed=1), normal(20, 2, 128, seed=2)
    want = kernels.attention_fp8(q.requires_grad_(), k, v, packed(20), 20, SCALE)
    monkeypatch.delattr(sys.modules[kernels.attention.__module__], "quantize_kv")
    with torch.no_grad():
        assert torch.equal(kernels.attention_fp8(q, k, v, packed(20), 20, SCALE), want)


def test_activation_checkpointing_changes_no_gradient():
    cu = packed(20)
    inputs = [normal(20, 4, 128), normal(20, 2, 128, seed=1), normal(20, 2, 128, seed=2)]
    gradients = []
    for checkpointed in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        call = (kernels.attention_fp8, *leaves, cu, 20, SCALE)
        out = checkpoint(*call, use_reentrant=False) if checkpointed else call[0](*call[1:])
        out.backward(normal(20, 4, 128, seed=9))
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_paged_attention_equals_packed_attention_for_any_chunks():
    """Three requests over scattered pages, in chunks and single steps, against whole packed sequences."""
    lengths, block_size = (37, 70, 1), 32
    cu, tokens = packed(*lengths), sum(lengths)
    q, k, v = normal(tokens, 4, 128), normal(tokens, 2, 128, seed=1), normal(tokens, 2, 128, seed=2)
    whole = kernels.attention_fp8(q, k, v, cu, max(lengths), SCALE)
    cache = torch.full(reference.cache_shape(7, block_size, 2), 255, dtype=torch.uint8)
    table = torch.tensor([[6, 1, 0], [2, 5, 3], [4, 0, 0]], dtype=torch.int32)
    steps = {0: [20, 1, 16], 1: [33, 36, 1], 2: [0, 1, 0]}
    done = [0, 0, 0]
    for step in range(3):
        fresh = [steps[r][step] for r in range(3)]
        index = torch.cat([torch.arange(done[r], done[r] + fresh[r]) + cu[r] for r in range(3)])
        places = [(r, p) for r in range(3) for p in range(done[r], done[r] + fresh[r])]
        slots = [table[r, p // block_size] * block_size + p % block_size for r, p in places]
        kernels.write_kv(k[index], v[index], cache, torch.tensor(slots))
        done = [d + f for d, f in zip(done, fresh, strict=True)]
        stored = torch.tensor(done, dtype=torch.int32)
        out = kernels.paged_attention_fp8(q[index], cache, packed(*fresh), stored, table, SCALE)
        assert torch.equal(out, whole[index])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda k: kernels.quantize_kv(k.float(), k), "k is torch.float32, expected torch.bfloat16"),
        (lambda k: kernels.quantize_kv(k[..., :64], k[..., :64]), r"\(3, 2, 64\) are not \[T, H, 128\]"),
        (lambda k: kernels.quantize_kv(k, k[:2]), r"values \(2, 2, 128\) are not"),
        (lambda k: kernels.quantize_dequantize_kv(k, k[:2]), "^quantize_dequantize_kv: keys"),
        (lambda k: kernels.write_kv(k, k, torch.zeros(2, 2, 16, 256), torch.arange(3)), "is not contiguous uint8"),
        (lambda k: kernels.attention_fp8(k, k.float(), k, packed(3), 3, SCALE), "k is torch.float32, expected"),
    ],
)
def test_mismatched_operands_raise(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(normal(3, 2, 128))

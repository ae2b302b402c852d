# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache on a GPU: bytes of the reference, and gradients of attention over it."""

from functools import partial

import pytest
import torch
from tensors import SCALES, assert_seen, different, every_maximum, every_number, normal, of_every_size, outliers, packed

from jetrl_verl import kernels, reference
from jetrl_verl.kernels import dispatch

SCALE = 128**-0.5
pytestmark = pytest.mark.usefixtures("native_library")


@pytest.mark.parametrize("change", [lambda x: x, outliers, of_every_size])
@pytest.mark.parametrize("in_part", [False, True])
def test_bytes_match_the_reference(change, in_part):
    k, v = (change(normal(777, 8, 128, seed=seed, device="cuda")) for seed in (0, 1))
    k[5, 0, 0], v[6, 1, 1], k[7] = float("inf"), float("nan"), 0
    if in_part:
        k, v = torch.cat([k, v], dim=1).split([8, 8], dim=1)
    got = dispatch.implementation("quantize_kv", "triton")(k, v)
    want = dispatch.implementation("quantize_kv", "reference")(k.cpu(), v.cpu())
    for actual, desired in zip(got, want, strict=True):
        if actual.dtype == torch.bfloat16:
            assert different(actual.nan_to_num(7).cpu(), desired.nan_to_num(7)) == 0
        else:
            assert torch.equal(actual.view(torch.uint8).cpu(), desired.view(torch.uint8))
    back = dispatch.implementation("dequantize_kv", "triton")(*got[:4])
    alone = dispatch.implementation("quantize_dequantize_kv", "triton")(k, v)
    for seen in (back, alone):
        assert all(different(a.nan_to_num(7), b.nan_to_num(7)) == 0 for a, b in zip(seen, got[4:], strict=True))
    slots = torch.randperm(1024, device="cuda")[:777]
    slots[3] = -1
    caches = []
    for device, backend in (("cuda", "triton"), ("cpu", "reference")):
        caches.append(torch.zeros(reference.cache_shape(32, 32, 8), dtype=torch.uint8, device=device))
        call = (x.to(device) for x in (k, v, caches[-1], slots))
        dispatch.implementation("write_kv", backend)(*call)
    assert torch.equal(caches[0].cpu(), caches[1])


@pytest.mark.parametrize("keep", [True, False])
def test_every_bf16_value_scale_and_maximum_matches_the_reference(keep):
    """12 million values; the interpreter does not have the GPU's instruction for sums of BF16."""
    heads = torch.cat([*map(every_number, SCALES), every_maximum()])
    name = "quantize_kv" if keep else "quantize_dequantize_kv"
    k, v = dispatch.implementation(name, "triton")(heads.cuda(), heads.neg().cuda())[-2:]
    assert_seen(k, heads)
    assert_seen(v, heads.neg())


def test_gradients_match_attention_over_quantized_keys_and_values():
    lengths = (513, 40)
    cu, tokens = packed(*lengths).cuda(), sum(lengths)
    q, k, v = (normal(tokens, heads, 128, seed=heads, device="cuda") for heads in (32, 8, 8))
    _, *seen = kernels.quantize_kv(k, v)
    gradient, gradients = normal(tokens, 32, 128, seed=9, device="cuda"), []
    recomputed = partial(kernels.attention_fp8, keep_fp8=False)
    cases = (((q, k, v), kernels.attention_fp8), ((q, k, v), recomputed), ((q, *seen), kernels.attention))
    for operands, attend in cases:
        operands = [x.clone().requires_grad_() for x in operands]
        attend(*operands, cu, max(lengths), SCALE).backward(gradient)
        gradients.append([x.grad for x in operands])
    *of_fp8, want = gradients
    assert all((a - b).norm() <= 2**-8 * b.norm() for got in of_fp8 for a, b in zip(got, want, strict=True))

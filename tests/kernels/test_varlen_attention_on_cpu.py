# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packed attention of stock modules on the CPU, and the kernels that a GPU would choose or lack."""

import pytest
import torch
from torch.nn import functional

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch, vllm_kernels
from jetrl_verl.kernels.attention import flash_attention_3
from jetrl_verl.kernels.varlen_attention import torch_flash_attention

LENGTHS = (7, 1, 40, 23, 1, 129)


def operands(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(sum(LENGTHS), count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def cu_seqlens() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sequence_matches_stock_sdpa_of_it_alone(dtype):
    q, k, v = operands(6, 2, 64, dtype)
    out = kernels.varlen_attention(q, k, v, cu_seqlens(), max(LENGTHS), 0.2)
    for rows, *parts in zip(*(x.split(LENGTHS) for x in (out, q, k, v)), strict=True):
        parts = [x.transpose(0, 1)[None] for x in parts]
        alone = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.2, enable_gqa=True)
        assert torch.equal(rows, alone[0].transpose(0, 1))


def test_sequences_do_not_affect_each_other():
    q, k, v = operands(2, 1, 64, torch.float32)
    whole = kernels.varlen_attention(q, k, v, cu_seqlens(), max(LENGTHS), 0.125)
    others = torch.ones(len(q), dtype=torch.bool)
    others[8:48] = False
    for x in (q, k, v):
        x[others] = torch.nan
    assert torch.equal(kernels.varlen_attention(q, k, v, cu_seqlens(), max(LENGTHS), 0.125)[8:48], whole[8:48])


@pytest.mark.parametrize(
    ("features", "dtype", "sentence"),
    [
        ((192, 192, 128), torch.bfloat16, "queries, keys and values of 192, 192 and 128 features per head"),
        ((100, 100, 100), torch.bfloat16, "heads of 100"),
        ((320, 320, 320), torch.bfloat16, "heads of 320"),
        ((64, 64, 64), torch.float32, "operands in torch.float32, .*"),
    ],
)
def test_unsupported_operands_of_flash_attention_raise(features, dtype, sentence):
    """On the meta device: the error comes before anything runs."""
    operands = [torch.empty(8, 2, n, dtype=dtype, device="meta") for n in features]
    with pytest.raises(ValueError, match=f"varlen_attention: there is no kernel for {sentence}$"):
        kernels.varlen_attention(*operands, torch.tensor([0, 8]), 8, 0.125)


@pytest.mark.parametrize(("missing", "forward"), [(None, flash_attention_3), ("not Hopper", torch_flash_attention)])
def test_a_gpu_without_flash_attention_3_runs_torch_flash_attention(monkeypatch, missing, forward):
    monkeypatch.setattr(vllm_kernels, "no_flash_attention_3", lambda: missing)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert dispatch.lookup("varlen_attention", torch.device("cuda")) is forward


def test_a_machine_without_a_gpu_has_no_flash_attention_3():
    assert vllm_kernels.no_flash_attention_3() is not None or torch.cuda.is_available()

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of a mixture of experts without a GPU: run under the interpreter, and compiled for Hopper."""

import re

import pytest
import torch
from test_triton_for_hopper import ptx_for_hopper

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.combine import _combine_kernel
from jetrl_verl.kernels.gather_quantize import _gather_quantize_kernel
from jetrl_verl.kernels.gather_quantized import _gather_kernel
from jetrl_verl.kernels.gather_relayout import _gather_relayout_kernel
from jetrl_verl.kernels.grouped_gemm import _FEW, _MANY, _WGRAD, _grouped_gemm_kernel, _grouped_wgrad_kernel
from jetrl_verl.kernels.route import _route_kernel
from jetrl_verl.kernels.route_and_permute import _permute_kernel
from jetrl_verl.kernels.segments import _count_kernel, _place_kernel, _sum_kernel
from jetrl_verl.kernels.weighted_silu_mul import _add_parts_kernel, _backward_quantize_kernel, _quantize_kernel


@pytest.mark.parametrize("tile", [_MANY, _FEW])
def test_grouped_gemm_uses_the_instructions_of_the_dense_gemm(tile):
    """One K block is gemm_nt's chain of four matrix instructions from zero, and one promotion."""
    block_m, block_n, warps, stages = tile
    types = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "out_ptr": "*bf16", "start_ptr": "*i32"}
    types |= dict.fromkeys(("a_scales_ptr", "b_scales_ptr"), "*fp32")
    constants = {"LANES": 128, "BLOCK_M": block_m, "BLOCK_N": block_n, "stride_bk": 1}
    ptx = ptx_for_hopper(_grouped_gemm_kernel, types, constants, num_warps=warps, num_stages=stages)
    instructions = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert instructions == [f"m64n{block_n}k32.f32.e4m3.e4m3"] * 4
    assert ptx.count("fma.rn.f32") == block_m * block_n // (32 * warps)


def test_grouped_wgrad_uses_the_instructions_of_the_dense_one():
    block_n, block_k, warps, stages = _WGRAD
    types = {"dy_ptr": "*fp8e4nv", "x_ptr": "*fp8e4nv", "out_ptr": "*bf16", "start_ptr": "*i32"}
    types |= dict.fromkeys(("dy_scales_ptr", "x_scales_ptr"), "*fp32")
    constants = {"BLOCK_N": block_n, "BLOCK_K": block_k}
    ptx = ptx_for_hopper(_grouped_wgrad_kernel, types, constants, num_warps=warps, num_stages=stages)
    instructions = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert instructions == [f"m64n{block_k}k32.f32.e4m3.e4m3"] * 4


INT32 = dict.fromkeys(("experts_ptr", "counts_ptr", "before_ptr", "totals_ptr", "row_ptr", "pair_ptr"), "*i32")
INT32 |= dict.fromkeys(("start_ptr", "source_ptr", "words_ptr", "dy_words_ptr", "gate_up_words_ptr"), "*i32")
INT32 |= dict.fromkeys(("colwise_qdata_ptr", "out_qdata_ptr"), "*i32")
FP32 = dict.fromkeys(("logits_ptr", "weights_ptr", "scales_ptr", "out_scales_ptr", "dweights_ptr"), "*fp32")
FP32 |= dict.fromkeys(("rowwise_scales_ptr", "colwise_scales_ptr", "parts_ptr"), "*fp32")
BF16 = dict.fromkeys(("y_ptr", "out_ptr", "gate_up_ptr"), "*bf16")
QDATA = {"qdata_ptr": "*u8", "rowwise_pairs_ptr": "*i16"}

CHOICE = {"K": 8, "K_LANES": 8, "LANES": 128, "RENORMALIZE": True}
ROWS = {"PAIRS": 512, "TILE": 512, "GROUPS": 16}
PIECES = {"LANES": 128, "PIECE": 256, "AT_ONCE": 32}


@pytest.mark.parametrize("tokens", [4, 8])
def test_routing_needs_no_barrier_and_copies_16_bytes_at_a_time(tokens):
    """Each warp has its own rows, so an integer maximum or minimum is one instruction."""
    constants = CHOICE | ROWS | {"CHOOSES": True, "TOKENS": tokens}
    ptx = ptx_for_hopper(_permute_kernel, INT32 | FP32 | {"out_ptr": "*i32"}, constants, num_warps=4)
    maxima = 2 * 8 * tokens // 4
    assert len(re.findall(r"redux\.sync\.(?:max|min)\.s32", ptx)) == maxima
    assert "bar.sync" not in ptx[: ptx.rindex("redux.sync.min")]
    assert ptx.count("st.global.v4.b32") == 8, "a token's words, once an expert"
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")


@pytest.mark.parametrize(
    ("kernel", "types", "constants", "warps"),
    [
        (_route_kernel, {}, CHOICE | {"TOKENS": 4}, 4),
        (_permute_kernel, {"out_ptr": "*i32"}, CHOICE | ROWS | {"CHOOSES": True, "TOKENS": 8}, 4),
        (_permute_kernel, {"out_ptr": "*i32"}, CHOICE | ROWS | {"CHOOSES": False, "TOKENS": 1}, 4),
        (_count_kernel, {}, PIECES, 8),
        (_sum_kernel, {}, {"TILE": 256}, 1),
        (_place_kernel, {}, PIECES, 8),
        (_gather_kernel, {"out_ptr": "*i32"}, {"TILE": 512, "GROUPS": 16}, 4),
        (_combine_kernel, {}, {"RANKS": 1, "K": 8, "TILE": 256}, 1),
        (_combine_kernel, {}, {"RANKS": 1, "K": 8, "TILE": 1024}, 4),
        (_quantize_kernel, {}, {"POW2": False, "GROUPS": 8}, 4),
        (_quantize_kernel, {}, {"POW2": False, "GROUPS": 32}, 4),
        (_gather_quantize_kernel, {}, {"K": 8, "POW2": False}, 4),
        (_gather_relayout_kernel, {}, {"K": 8, "POW2": False, "COLUMNS": 32}, 1),
        (_backward_quantize_kernel, {}, {"POW2": False}, 8),
        (_add_parts_kernel, {}, {"TILE": 1024}, 4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kernels_compile_for_hopper_without_atomics(kernel, types, constants, warps):
    ptx = ptx_for_hopper(kernel, INT32 | FP32 | BF16 | QDATA | types, constants, num_warps=warps)
    assert "ld.global" in ptx and not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_combine_rounds_the_sum_of_each_rank_in_registers(ranks):
    ptx = ptx_for_hopper(_combine_kernel, INT32 | BF16, {"RANKS": ranks, "K": 8, "TILE": 1024}, num_warps=4)
    assert ptx.count("ld.global.v4.b32") == 8 * ranks and ptx.count("st.global.v4.b32") == 1
    assert len(re.findall(r"ld\.global\.b32", ptx)) == 8, "rows' numbers are read once"
    # Of two ranks the last sum is one of two BF16 numbers, which rounds alike in BF16.
    in_bf16 = 2 * ptx.count("add.bf16x2")
    rounded = 2 * ptx.count("cvt.rn.bf16x2.f32") + ptx.count("cvt.rn.bf16.f32") + in_bf16
    assert rounded == 8 * (ranks + (ranks > 1)), "of eight elements a thread"
    assert ptx.count("add.f32") + in_bf16 == 8 * (7 * ranks + ranks - 1)
    assert not re.search(r"\b(atom|red|bar)\.", ptx)


@pytest.mark.parametrize("pow2", [True, False])
def test_tokens_are_read_once_and_16_bytes_at_a_time_into_both_layouts(pow2):
    """128 threads read a tile of 128 rows of 256 bytes and write half as much in each layout."""
    types = INT32 | FP32 | QDATA
    ptx = ptx_for_hopper(_gather_quantize_kernel, types, {"K": 8, "POW2": pow2}, num_warps=4, maxnreg=168)
    assert ptx.count("ld.global.v4.b32") == 128 * 256 // (128 * 16)
    assert ptx.count("st.global.v4.b32") == 2 * 128 * 128 // (128 * 16)
    assert "div.rn.f32" not in ptx and "div.full.f32" not in ptx
    ptx = ptx_for_hopper(_gather_relayout_kernel, types, {"K": 8, "POW2": pow2, "COLUMNS": 32}, num_warps=1)
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") == 128 * 32 // (32 * 16)


def test_route_and_permute_equals_its_separate_operations():
    logits, x = torch.randn(40, 8), kernels.quantize_1x128(torch.randn(40, 256).bfloat16(), "fp32")
    weights, where, rows = kernels.route_and_permute(logits, x, 2, True)
    chosen, expected = kernels.route(logits, 2, True)
    assert torch.equal(weights, expected)
    assert all(map(torch.equal, where, kernels.segments(chosen, 8, 1)))
    gathered = kernels.gather_quantized(x, where.pair, 2)
    assert torch.equal(rows.qdata.view(torch.uint8), gathered.qdata.view(torch.uint8))
    assert torch.equal(rows.scales, gathered.scales)


def test_mismatched_operands_raise():
    x, where = torch.zeros(4, 200, dtype=torch.bfloat16), reference.segments(torch.zeros(4, 1, dtype=torch.int32), 2, 1)
    with pytest.raises(ValueError, match="not whole groups of 128"):
        kernels.gather_quantize_1x128_and_128x1(x, where.pair, 1, "fp32")
    quantized = reference.quantize_1x128(torch.zeros(4, 256), "fp32")
    with pytest.raises(ValueError, match="4 rows are not whole groups of 128; align segments to 128"):
        kernels.gather_relayout_128x1(quantized, where.pair, 1, "fp32")
    with pytest.raises(TypeError, match="x is torch.float32"):
        kernels.gather_quantize_1x128_and_128x1(torch.zeros(4, 256), where.pair, 1, "fp32")
    with pytest.raises(ValueError, match="k=3"):
        kernels.route_and_permute(torch.zeros(4, 2), quantized, 3, True)
    a, b = (
        reference.quantize_1x128(torch.zeros(4, 384), "fp32"),
        reference.quantize_128x128(torch.zeros(256, 384), "fp32"),
    )
    b = reference.QuantizedTensor(b.qdata.view(2, 128, 384), b.scales.view(2, 1, 3))
    with pytest.raises(ValueError, match="K = 384 does not divide into 2 slices of multiples of 128"):
        kernels.grouped_gemm_nt_of_ranks(a, b, where.start, 2)
    with pytest.raises(TypeError, match=r"combine_of_ranks: y is torch.float32"):
        kernels.combine_of_ranks(torch.zeros(2, 4, 128), where.row)
    with pytest.raises(ValueError, match="got .5, 2. torch.float32, .4, 256. and k=1"):
        kernels.route_and_permute(torch.zeros(5, 2), quantized, 1, True)

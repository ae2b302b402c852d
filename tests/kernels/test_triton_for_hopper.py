# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""PTX and machine code of the Triton kernels for Hopper, compiled for sm_90 without a GPU."""

import re

import pytest
from hopper import compiled, machine_code_of, module, ptx_of

from jetrl_verl.kernels import gated_delta_rule_gradient as gradient
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.kernels.grouped_gemm import _FEW, _MANY, _WGRAD
from jetrl_verl.kernels.kv_cache import _ROWS
from jetrl_verl.kernels.log_probs import CHUNK, LANES, PICKED, ROWS_TOGETHER, WARPS
from jetrl_verl.kernels.logits import MANY_ROWS, ROUTER_TILES
from jetrl_verl.kernels.logits import TILES as TILES_OF_LOGITS
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM

ATOMICS = re.compile(r"\b(atom|red)\.")
E4M3 = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "dy_ptr": "*fp8e4nv", "x_ptr": "*fp8e4nv"}


def matrix_instructions(ptx: str) -> list[str]:
    return re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)


@pytest.mark.parametrize(("b_block_scaled", "of_ranks"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("tile", TILES)
def test_one_k_block_is_one_chain_of_four_matrix_instructions(tile, b_block_scaled, of_ranks):
    """The GEMM's row invariance depends on it: m64, k32, four in a row from zero, for every tile."""
    block_m, block_n, warps, stages = tile
    types = E4M3 | {"out_ptr": "*bf16" if b_block_scaled else "*fp32", "bias_ptr": "*fp32"}
    constants = {"B_BLOCK_SCALED": b_block_scaled, "WITH_BIAS": False, "EVEN_K": True}
    constants |= {"OF_RANKS": of_ranks, "BLOCK_M": block_m, "BLOCK_N": block_n, "TILES_PER_GROUP": 8}
    ptx = ptx_of("gemm_nt._gemm_nt_kernel", constants, types=types, num_warps=warps, num_stages=stages)
    assert matrix_instructions(ptx) == [f"m64n{block_n}k32.f32.e4m3.e4m3"] * 4
    # One fused multiply-add promotes each element of a thread's share of the tile, and nothing else does.
    elements = block_m * block_n // (32 * warps)
    assert ptx.count("fma.rn.f32") == elements
    # Copies run ahead of the chains, also where a rank's slice may end with any of them.
    assert re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx) == [str(2 * (stages - 2)), "0"]
    assert ptx.count("cvt.rn.bf16.f32") == of_ranks * elements, "each rank's product is rounded"


@pytest.mark.parametrize("tile", [_MANY, _FEW])
def test_grouped_gemm_uses_the_instructions_of_the_dense_gemm(tile):
    """One K block is gemm_nt's chain of four matrix instructions from zero, and one promotion."""
    block_m, block_n, warps, stages = tile
    constants = {"LANES": 128, "BLOCK_M": block_m, "BLOCK_N": block_n, "stride_bk": 1}
    options = {"num_warps": warps, "num_stages": stages}
    ptx = ptx_of("grouped_gemm._grouped_gemm_kernel", constants, types=E4M3, **options)
    assert matrix_instructions(ptx) == [f"m64n{block_n}k32.f32.e4m3.e4m3"] * 4
    assert ptx.count("fma.rn.f32") == block_m * block_n // (32 * warps)


def test_grouped_wgrad_uses_the_instructions_of_the_dense_one():
    block_n, block_k, warps, stages = _WGRAD
    options = {"num_warps": warps, "num_stages": stages}
    constants = {"BLOCK_N": block_n, "BLOCK_K": block_k}
    ptx = ptx_of("grouped_gemm._grouped_wgrad_kernel", constants, types=E4M3, **options)
    assert matrix_instructions(ptx) == [f"m64n{block_k}k32.f32.e4m3.e4m3"] * 4


def test_the_int8_gemm_uses_hoppers_integer_instruction_once_per_32_of_k():
    constants = {"WITH_BIAS": True, "EVEN_K": True, "TILE_M": 64, "TILE_N": 128, "TILE_K": 128}
    types = {"a_ptr": "*i8", "b_ptr": "*i8"}
    ptx = ptx_of("gemm_int8._gemm_int8_kernel", constants, types=types, num_warps=4, num_stages=4)
    assert matrix_instructions(ptx) == ["m64n128k32.s32.s8.s8"] * 4
    # The bias is fused into the second product, once per element of a thread's share of the tile.
    assert ptx.count("fma.rn.f32") == 64 * 128 // 128


@pytest.mark.parametrize("tile", [TILES_OF_LOGITS[512], MANY_ROWS])
def test_logits_are_one_chain_of_matrix_instructions_with_tma(tile):
    """The bits of logits depend on it: sixteen products an instruction, ascending, for every tile."""
    types = {"hidden": f"tensordesc<bf16[{tile.m}, {tile.k}]>", "weight": f"tensordesc<bf16[{tile.n}, {tile.k}]>"}
    types["out_ptr"] = "*fp32"
    constants = {"K": 4096, "TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k, "PROGRAMS": 132}
    ptx = ptx_of("logits._tma_logits_kernel", constants, types=types, num_warps=tile.warps, num_stages=tile.stages)
    assert set(matrix_instructions(ptx)) == {f"m64n{tile.n}k16.f32.bf16.bf16"}
    assert "cp.async.bulk.tensor.2d" in ptx and "cp.async.cg" not in ptx


@pytest.mark.parametrize("tile", [*TILES_OF_LOGITS.values(), MANY_ROWS, ROUTER_TILES[16], ROUTER_TILES[512]])
def test_logits_are_one_chain_of_matrix_instructions_into_one_accumulator(tile):
    constants = {"K": 4096, "TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k}
    options = {"types": {"out_ptr": "*fp32"}, "num_warps": tile.warps, "num_stages": tile.stages}
    ptx = ptx_of("logits._logits_kernel", constants, **options)
    instructions = re.findall(r"mma(?:_async)?\.sync\.aligned\.(\S+)", ptx)
    assert len(instructions) == tile.k // 16, "one after the other, for every tile"
    if tile.m < 64:
        assert set(instructions) == {"m16n8k16.row.col.f32.bf16.bf16.f32"}
    else:
        assert set(instructions) == {f"m64n{tile.n * tile.m // 16 // tile.warps}k16.f32.bf16.bf16"}
    assert not ATOMICS.search(ptx)


QUANTIZER = {"POW2": False, "EVEN_K": True, "GROUPS": 32}
SUM_OF_SQUARES = {"K": 128, "TILE": 128, "UNIT_OFFSET": False}
OF_HEADS = {"D": 128, "WIDTH": 128, "UNIT_OFFSET": False, "HEADS": HEADS_OF_A_PROGRAM}
QKV = {"Q_HEADS": 28, "K_HEADS": 4, "Q_TOKEN": 4608, "K_TOKEN": 4608, "Q_HEAD": 128, "K_HEAD": 128}
ROTATED = {"Q_HEADS": 28, "Q_TILE": 32, "K_HEADS": 4, "K_TILE": 4, "HALF": 64, "REST": 0, "REST_TILE": 1}
QUANTIZED = {"WITH_Y": True, "QUANTIZE": True, "POW2": False}
CHOICE = {"K": 8, "K_LANES": 8, "LANES": 128, "RENORMALIZE": True}
ROWS = {"PAIRS": 512, "TILE": 512, "GROUPS": 16}
PIECES = {"LANES": 128, "PIECE": 256, "AT_ONCE": 32}
INT64 = {"words_ptr": "*i64", "table_ptr": "*i64", "constants_ptr": "*i64", "out_ptr": "*i64"}
MERGED = {"a_ptr": "*bf16", "b_ptr": "*bf16", "scale": "fp32"}
OF_THE_CONV = {"weight_ptr": "*i64", "slots_ptr": "*i32"}
FP32_OUT, INT32_OUT = {"out_ptr": "*fp32", "total_ptr": "*fp32"}, {"out_ptr": "*i32"}


@pytest.mark.parametrize(
    ("name", "constants", "types", "warps"),
    [
        ("rotary._rotary_kernel", ROTATED | {"INVERSE": False}, {}, 4),
        ("norm_rotary._norm_rotary_kernel", OF_HEADS | QKV, {}, 4),
        ("rms_norm._backward_kernel", SUM_OF_SQUARES | {"ROWS": 16}, {}, 4),
        ("silu_mul._silu_mul_kernel", {"TILE": 1024}, {}, 4),
        ("silu_mul._silu_mul_backward_kernel", {"TILE": 1024}, {}, 4),
        ("sigmoid_mul._sigmoid_mul_kernel", {"D": 256, "GROUPS": 32} | QUANTIZED, {}, 4),
        ("sigmoid_mul._sigmoid_mul_backward_kernel", {"D": 256, "GROUPS": 32}, {}, 4),
        ("log_probs._chunk_kernel", {"CHUNK": CHUNK, "ROWS_TOGETHER": ROWS_TOGETHER}, {}, WARPS),
        ("log_probs._combine_kernel", {"LANES": LANES}, {}, 4),
        ("log_probs._pick_kernel", {"PICKED": PICKED}, FP32_OUT, 4),
        ("log_probs._gradient_kernel", {"CHUNK": CHUNK}, FP32_OUT, WARPS),
        ("draw._draw_kernel", {"CHUNK": CHUNK, "CHUNKS": 1}, {}, WARPS),
        ("draw._draw_kernel", {"CHUNK": CHUNK, "CHUNKS": 64}, {}, WARPS),
        ("draw._rank_kernel", {"CHUNK": CHUNK}, {}, WARPS),
        ("merge_adapter._merge_kernel", {"TILE_N": 32, "TILE_K": 256}, MERGED, 4),
        ("block_sums._one_kernel", {"BLOCK": 128}, INT64, 4),
        ("block_sums._many_kernel", {"HALVINGS": 8, "BLOCK": 128}, INT64, 4),
        ("causal_conv1d._conv_kernel", {"TOKENS": 16, "CHANNELS": 256, "stride_channel": 1}, OF_THE_CONV, 4),
        ("causal_conv1d._conv_kernel", {"TOKENS": 4, "CHANNELS": 1024, "stride_channel": 1}, OF_THE_CONV, 4),
        ("causal_conv1d._conv_kernel", {"TOKENS": 1, "CHANNELS": 1024, "stride_channel": 1}, OF_THE_CONV, 4),
        ("causal_conv1d._conv_backward_kernel", {"TOKENS": 64, "CHANNELS": 128}, OF_THE_CONV, 4),
        ("gated_rms_norm._gated_norm_kernel", {"HEADS": 8} | QUANTIZED, {}, 4),
        ("gated_rms_norm._gated_norm_backward_kernel", {"HEADS": 16}, {}, 4),
        ("route._route_kernel", CHOICE | {"TOKENS": 4}, {}, 4),
        ("route_and_permute._permute_kernel", CHOICE | ROWS | {"CHOOSES": True, "TOKENS": 8}, INT32_OUT, 4),
        ("route_and_permute._permute_kernel", CHOICE | ROWS | {"CHOOSES": False, "TOKENS": 1}, INT32_OUT, 4),
        ("segments._count_kernel", PIECES, {}, 8),
        ("segments._sum_kernel", {"TILE": 256}, {}, 1),
        ("segments._place_kernel", PIECES, {}, 8),
        ("gather_quantized._gather_kernel", {"TILE": 512, "GROUPS": 16}, INT32_OUT, 4),
        ("add_shared_expert._add_kernel", {"TILE": 1024}, {}, 4),
        ("add_shared_expert._backward_kernel", {"WIDTH": 2048}, {"dlogits_ptr": "*fp32"}, 4),
        ("combine._combine_kernel", {"RANKS": 1, "K": 8, "TILE": 256}, {}, 1),
        ("combine._combine_kernel", {"RANKS": 1, "K": 8, "TILE": 1024}, {}, 4),
        ("weighted_silu_mul._quantize_kernel", {"POW2": False, "GROUPS": 8}, {}, 4),
        ("weighted_silu_mul._quantize_kernel", {"POW2": False, "GROUPS": 32}, {}, 4),
        ("weighted_silu_mul._backward_quantize_kernel", {"POW2": False}, {}, 8),
        ("weighted_silu_mul._add_parts_kernel", {"TILE": 1024}, {}, 4),
        ("gather_quantize._gather_quantize_kernel", {"K": 8, "POW2": False}, {}, 4),
        ("gather_relayout._gather_relayout_kernel", {"K": 8, "POW2": False, "COLUMNS": 32}, {}, 1),
        ("kv_cache._dequantize_kernel", {"ROWS": 16}, {}, 4),
        ("kv_cache._read_kernel", {"HEADS": 8, "UNITS": 1}, {"table_ptr": "*i32"}, 4),
    ],
)
def test_kernels_compile_for_hopper_without_atomics(name, constants, types, warps):
    ptx = ptx_of(name, constants, types=types, num_warps=warps)
    assert "ld.global" in ptx and not ATOMICS.search(ptx)


@pytest.mark.parametrize(("capability", "count"), [(89, 0), (90, 1), (100, 1)])
def test_the_quantizer_launches_its_dependents_at_once_on_hopper(capability, count):
    ptx = ptx_of("quantize_1x128._quantize_1x128_kernel", QUANTIZER, capability=capability, num_warps=4)
    assert ptx.count("griddepcontrol.launch_dependents") == count
    assert "griddepcontrol.launch_dependents" not in ptx[ptx.index("ld.global") :]
    assert "griddepcontrol.wait" not in ptx


def test_the_convolution_launches_the_delta_rule_at_once():
    constants = {"TOKENS": 1, "CHANNELS": 1024, "stride_channel": 1}
    ptx = ptx_of("causal_conv1d._conv_kernel", constants, types=OF_THE_CONV, num_warps=4)
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize(
    ("name", "constants", "options", "loads", "stores"),
    [
        ("quantize_1x128._quantize_1x128_kernel", QUANTIZER, {"num_warps": 4}, 4, 2),
        # 128 threads read a tile of 128 rows of 256 bytes and write half as much in each layout.
        ("gather_quantize._gather_quantize_kernel", {"K": 8}, module("gather_quantize")._LAUNCH, 16, 16),
        ("gather_relayout._gather_relayout_kernel", {"K": 8, "COLUMNS": 32}, {"num_warps": 1}, 8, 8),
    ],
    ids=["quantize", "gather and quantize", "gather and re-layout"],
)
def test_quantizers_move_16_bytes_at_a_time_and_do_not_divide(name, constants, options, loads, stores, pow2):
    ptx = ptx_of(name, constants | {"POW2": pow2}, **options)
    assert ptx.count("ld.global.v4.b32") == loads and ptx.count("st.global.v4.b32") == stores
    assert "div.rn.f32" not in ptx and "div.full.f32" not in ptx


def test_the_int8_quantizer_divides_once_a_row():
    ptx = ptx_of("quantize_int8._quantize_int8_kernel", {"PIECE": 4096}, types={"qdata_ptr": "*i8"}, num_warps=8)
    assert ptx.count("div.rn.f32") == 1 and "div.full.f32" not in ptx


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("kv_cache._quantize_kernel", {"HEADS": 8, "ROWS": _ROWS, "KEEP": True}),
        ("kv_cache._write_kernel", {"HEADS": 8, "UNITS": 1}),
        ("quantize_1x128._quantize_1x128_kernel", QUANTIZER | {"POW2": True}),
    ],
)
def test_packed_qdata_are_only_stored(name, constants):
    """ptxas 12.8 reads a register of packed E4M3 before it is written if anything else uses it: an unpack and a shift
    both gave constants for half of the values on a GPU."""
    ptx = re.sub(r"//.*", "", ptx_of(name, constants))
    assert not ATOMICS.search(ptx)
    packed = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", ptx))
    assert packed, "it packs"
    for line in ptx.splitlines():
        read = packed & set(re.findall(r"%rs\d+", line.partition(",")[2] if "{" not in line else line))
        if read and "cvt.rn.satfinite" not in line:
            words = re.search(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", line)
            stored = re.search(r"st\.(shared|global)\S*\s", line)
            assert stored or (words and packed.issuperset(words.groups())), line


@pytest.mark.parametrize("keep", [True, False])
def test_quantize_dequantize_kv_rounds_two_values_at_a_time(keep):
    """Without unpacking the 16 values of a thread; loads and stores of 16 bytes."""
    ptx = ptx_of("kv_cache._quantize_kernel", {"HEADS": 8, "ROWS": _ROWS, "KEEP": keep})
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == keep and "div." not in ptx
    words = _ROWS * 64 // 128
    assert ptx.count("fma.rn.bf16x2") == 3 * words
    assert ptx.count("mul.f32") == (2 * words if keep else 0), "of qdata"
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == words // 4
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == words // 4 + keep * words // 8


@pytest.mark.parametrize("tokens", [4, 8])
def test_routing_needs_no_barrier_and_copies_16_bytes_at_a_time(tokens):
    """Each warp has its own rows, so an integer maximum or minimum is one instruction."""
    constants = CHOICE | ROWS | {"CHOOSES": True, "TOKENS": tokens}
    ptx = ptx_of("route_and_permute._permute_kernel", constants, types=INT32_OUT, num_warps=4)
    maxima = 2 * 8 * tokens // 4
    assert len(re.findall(r"redux\.sync\.(?:max|min)\.s32", ptx)) == maxima
    assert "bar.sync" not in ptx[: ptx.rindex("redux.sync.min")]
    assert ptx.count("st.global.v4.b32") == 8, "a token's words, once an expert"
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_combine_rounds_the_sum_of_each_rank_in_registers(ranks):
    ptx = ptx_of("combine._combine_kernel", {"RANKS": ranks, "K": 8, "TILE": 1024}, num_warps=4)
    assert ptx.count("ld.global.v4.b32") == 8 * ranks and ptx.count("st.global.v4.b32") == 1
    assert len(re.findall(r"ld\.global\.b32", ptx)) == 8, "rows' numbers are read once"
    # Of two ranks the last sum is one of two BF16 numbers, which rounds alike in BF16.
    in_bf16 = 2 * ptx.count("add.bf16x2")
    rounded = 2 * ptx.count("cvt.rn.bf16x2.f32") + ptx.count("cvt.rn.bf16.f32") + in_bf16
    assert rounded == 8 * (ranks + (ranks > 1)), "of eight elements a thread"
    assert ptx.count("add.f32") + in_bf16 == 8 * (7 * ranks + ranks - 1)
    assert not re.search(r"\b(atom|red|bar)\.", ptx)


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("places", {"num_warps": 4}),
        ("prepare", gradient._PREPARE),
        ("states", gradient._SCAN),
        ("reverse", gradient._SCAN),
        ("gradients", gradient._OF_CHUNKS),
        ("queries_and_keys", gradient._OF_CHUNKS),
    ],
)
def test_the_gradient_of_the_delta_rule_spills_no_register(tmp_path, name, launch):
    """Two programs with two stages of copies share a multiprocessor's 228 KiB, of which each wastes one."""
    constants = {n: x for n, x in launch.items() if n.isupper()}
    options = {n: x for n, x in launch.items() if n.islower()}
    kernel = compiled(f"gated_delta_rule_gradient._{name}_kernel", constants, **options)
    assert not re.search(r"\b(STL|LDL|ATOM\w*|RED)\b", machine_code_of(kernel, tmp_path))
    assert kernel.metadata.shared <= 113 * 2**10
    assert ("wgmma" in kernel.asm["ptx"]) == (name != "places")

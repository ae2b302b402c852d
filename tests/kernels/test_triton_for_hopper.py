# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""PTX of the Triton kernels for Hopper, compiled for sm_90 without a GPU."""

import re
from pathlib import Path

import pytest
import triton
from machine_code import disassembled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jetrl_verl.kernels import kv_cache
from jetrl_verl.kernels.gemm_nt import TILES, _gemm_nt_kernel
from jetrl_verl.kernels.logits import MANY_ROWS, _tma_logits_kernel
from jetrl_verl.kernels.logits import TILES as TILES_OF_LOGITS
from jetrl_verl.kernels.quantize_1x128 import _quantize_1x128_kernel


def compiled_for_hopper(kernel, types: dict[str, str], constants: dict[str, object], capability=90, **options):
    """``kernel`` for sm_90 or another ``capability``, with all run-time arguments divisible by 16, as they are for a
    real layer."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in kernel.arg_names if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def ptx_for_hopper(*call, **options) -> str:
    """PTX of a kernel; arguments of :func:`compiled_for_hopper`."""
    return compiled_for_hopper(*call, **options).asm["ptx"]


def machine_code_for_hopper(folder: Path, *call, **options) -> str:
    """What Triton's assembler makes of the PTX, disassembled."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled_for_hopper(*call, **options).asm["cubin"])
    return disassembled(cubin)


@pytest.mark.parametrize(("b_block_scaled", "of_ranks"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("tile", TILES)
def test_one_k_block_is_one_chain_of_four_matrix_instructions(tile, b_block_scaled, of_ranks):
    """The GEMM's row invariance depends on it: m64, k32, four in a row from zero, for every tile."""
    block_m, block_n, warps, stages = tile
    types = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "out_ptr": "*bf16" if b_block_scaled else "*fp32"}
    types |= dict.fromkeys(("a_scales_ptr", "b_scales_ptr", "bias_ptr"), "*fp32")
    constants = {"B_BLOCK_SCALED": b_block_scaled, "WITH_BIAS": False, "EVEN_K": True}
    constants |= {"OF_RANKS": of_ranks, "BLOCK_M": block_m, "BLOCK_N": block_n, "TILES_PER_GROUP": 8}
    ptx = ptx_for_hopper(_gemm_nt_kernel, types, constants, num_warps=warps, num_stages=stages)
    instructions = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert instructions == [f"m64n{block_n}k32.f32.e4m3.e4m3"] * 4
    # One fused multiply-add promotes each element of a thread's share of the tile, and nothing else does.
    elements = block_m * block_n // (32 * warps)
    assert ptx.count("fma.rn.f32") == elements
    # Copies run ahead of the chains, also where a rank's slice may end with any of them.
    assert re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx) == [str(2 * (stages - 2)), "0"]
    assert ptx.count("cvt.rn.bf16.f32") == of_ranks * elements, "each rank's product is rounded"


@pytest.mark.parametrize("tile", [TILES_OF_LOGITS[512], MANY_ROWS])
def test_logits_are_one_chain_of_matrix_instructions_with_tma(tile):
    """The bits of logits depend on it: sixteen products an instruction, ascending, for every tile."""
    types = {"hidden": f"tensordesc<bf16[{tile.m}, {tile.k}]>", "weight": f"tensordesc<bf16[{tile.n}, {tile.k}]>"}
    constants = {"K": 4096, "TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k, "PROGRAMS": 132}
    types |= {"out_ptr": "*fp32"}
    ptx = ptx_for_hopper(_tma_logits_kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)) == {f"m64n{tile.n}k16.f32.bf16.bf16"}
    assert "cp.async.bulk.tensor.2d" in ptx and "cp.async.cg" not in ptx


@pytest.mark.parametrize(("capability", "count"), [(89, 0), (90, 1), (100, 1)])
def test_the_quantizer_launches_its_dependents_at_once_on_hopper(capability, count):
    types = {"x_ptr": "*bf16", "qdata_ptr": "*u8", "scales_ptr": "*fp32"}
    constants = {"POW2": False, "EVEN_K": True, "GROUPS": 32}
    ptx = ptx_for_hopper(_quantize_1x128_kernel, types, constants, capability, num_warps=4)
    assert ptx.count("griddepcontrol.launch_dependents") == count
    assert "griddepcontrol.launch_dependents" not in ptx[ptx.index("ld.global") :]
    assert "griddepcontrol.wait" not in ptx


@pytest.mark.parametrize("pow2", [True, False])
def test_the_quantizer_moves_16_bytes_at_a_time_and_does_not_divide(pow2):
    types = {"x_ptr": "*bf16", "qdata_ptr": "*u8", "scales_ptr": "*fp32"}
    constants = {"POW2": pow2, "EVEN_K": True, "GROUPS": 32}
    ptx = ptx_for_hopper(_quantize_1x128_kernel, types, constants, num_warps=4)
    assert ptx.count("ld.global.v4.b32") == 4
    assert ptx.count("st.global.v4.b32") == 2
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 16
    assert "div.rn.f32" not in ptx
    assert "div.full.f32" not in ptx


_OF_THE_CACHE = {"k_ptr": "*bf16", "v_ptr": "*bf16", "k_out_ptr": "*bf16", "v_out_ptr": "*bf16"}
_BYTES = ("key_ptr", "key_scales_ptr", "value_ptr", "value_scales_ptr")


_LAYOUT = {"HEADS": 8, "ROWS": kv_cache._ROWS, "UNITS": 1}


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (kv_cache._quantize_kernel, _OF_THE_CACHE | dict.fromkeys(_BYTES, "*u8"), _LAYOUT | {"KEEP": True}),
        (kv_cache._write_kernel, _OF_THE_CACHE | {"cache_ptr": "*u8", "slots_ptr": "*i64"}, _LAYOUT),
        (
            _quantize_1x128_kernel,
            {"x_ptr": "*bf16", "qdata_ptr": "*u8", "scales_ptr": "*fp32"},
            {"POW2": True, "EVEN_K": True, "GROUPS": 32},
        ),
    ],
)
def test_packed_qdata_are_only_stored(kernel, types, constants):
    """ptxas 12.8 reads a register of packed E4M3 before it is written if anything else uses it: an unpack and a shift
    both gave constants for half of the values on a GPU."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ptx = re.sub(r"//.*", "", ptx_for_hopper(kernel, types, constants))
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
    constants = {"HEADS": 8, "ROWS": kv_cache._ROWS, "KEEP": keep}
    ptx = ptx_for_hopper(kv_cache._quantize_kernel, _OF_THE_CACHE | dict.fromkeys(_BYTES, "*u8"), constants)
    words = kv_cache._ROWS * 64 // 128
    assert ptx.count("fma.rn.bf16x2") == 3 * words
    assert ptx.count("mul.f32") == (2 * words if keep else 0), "of qdata"
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == words // 4
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == words // 4 + keep * words // 8

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The shared operations' Triton kernels compiled for Hopper, without a GPU."""

import re
import sys

import pytest
from machine_code import disassembled
from test_triton_for_hopper import compiled_for_hopper, ptx_for_hopper

from jetrl_verl.kernels import gated_delta_rule_gradient as gradient
from jetrl_verl.kernels.block_sums import _many_kernel, _one_kernel
from jetrl_verl.kernels.draw import _draw_kernel, _rank_kernel
from jetrl_verl.kernels.log_probs import (
    CHUNK,
    LANES,
    PICKED,
    ROWS_TOGETHER,
    WARPS,
    _chunk_kernel,
    _combine_kernel,
    _gradient_kernel,
    _pick_kernel,
)
from jetrl_verl.kernels.logits import MANY_ROWS, ROUTER_TILES, TILES, _logits_kernel
from jetrl_verl.kernels.norm_rotary import _norm_rotary_kernel
from jetrl_verl.kernels.rms_norm import _backward_kernel, _rms_norm_kernel
from jetrl_verl.kernels.rotary import _rotary_kernel
from jetrl_verl.kernels.sigmoid_mul import _sigmoid_mul_backward_kernel, _sigmoid_mul_kernel
from jetrl_verl.kernels.silu_mul import _silu_mul_backward_kernel, _silu_mul_kernel
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM

BF16, FP32 = "*bf16", "*fp32"
conv, norm, rule = (
    sys.modules[f"jetrl_verl.kernels.{name}"] for name in ("causal_conv1d", "gated_rms_norm", "gated_delta_rule")
)  # the package's attributes are the functions
OF_THE_RULE = dict.fromkeys(("words_ptr", "states_ptr"), "*i64") | dict.fromkeys(
    ("slots_ptr", "computed_ptr", "cu_ptr"), "*i32"
)
OF_THE_RULE |= dict.fromkeys(("values_ptr", "dt_bias_ptr", "out_ptr"), BF16)
OF_THE_RULE |= dict.fromkeys(("b_ptr", "a_ptr", "a_log_ptr", "norms_ptr", "gates_ptr"), FP32)
OF_THE_CONV = {"weight_ptr": "*i64"} | dict.fromkeys(("slots_ptr", "computed_ptr", "cu_ptr"), "*i32")
OF_THE_CONV |= dict.fromkeys(("x_ptr", "dy_ptr", "dx_ptr", "y_ptr", "states_ptr"), BF16) | {"dw_ptr": FP32}
OF_THE_NORM = dict.fromkeys(("o_ptr", "z_ptr", "weight_ptr", "y_ptr", "dy_ptr", "do_ptr", "dz_ptr"), BF16)
OF_THE_NORM |= {"qdata_ptr": "*u8", "scales_ptr": FP32, "dw_ptr": FP32, "eps": "fp32"}
OF_ROWS = {"tokens_ptr": "*i64", "seeds_ptr": "*i64", "counters_ptr": "*i64", "counts_ptr": "*i32"} | dict.fromkeys(
    (
        *("logits_ptr", "temperature_ptr", "chunk_highest_ptr", "chunk_sums_ptr"),
        *("highest_ptr", "log_sum_ptr", "total_ptr", "out_ptr"),
    ),
    FP32,
)
"""Arguments of kernels that read the logits."""
OF_BLOCKS = dict.fromkeys(("words_ptr", "table_ptr", "constants_ptr", "out_ptr"), "*i64")


@pytest.mark.parametrize("k", [128, 4096])
def test_a_norm_is_summed_in_one_order_with_and_without_a_residual(k):
    """Both variants multiply and add the squares in the same sequence."""

    def arithmetic(with_residual: bool) -> list[str]:
        types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr"), BF16)
        types |= {"rstd_ptr": FP32, "scales_ptr": FP32, "qdata_ptr": "*u8", "eps": "fp32"}
        constants = {"K": k, "TILE": k, "HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k, "RESIDUAL": with_residual}
        constants["UNIT_OFFSET"] = False
        constants |= {"SLOTS": 0, "WITH_Y": True, "QUANTIZE": False, "POW2": False}
        warps = min(max(k // 512, 1), 16)
        ptx = ptx_for_hopper(_rms_norm_kernel, types, constants, num_warps=warps)
        # The residual sum before it is one BF16 addition, bitwise an FP32 addition rounded to BF16.
        return re.findall(r"\b((?:fma|mul|add|div|sqrt)\.[a-z.]*f32|shfl\.sync\.bfly)", ptx)

    assert arithmetic(True) == arithmetic(False)
    assert "shfl.sync.bfly" in arithmetic(True)


@pytest.mark.parametrize("tile", [*TILES.values(), MANY_ROWS, ROUTER_TILES[16], ROUTER_TILES[512]])
def test_logits_are_one_chain_of_matrix_instructions_into_one_accumulator(tile):
    types = {"hidden_ptr": BF16, "weight_ptr": BF16, "out_ptr": FP32}
    constants = {"K": 4096, "TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k}
    ptx = ptx_for_hopper(_logits_kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)
    instructions = re.findall(r"mma(?:_async)?\.sync\.aligned\.(\S+)", ptx)
    assert len(instructions) == tile.k // 16, "one after the other, for every tile"
    if tile.m < 64:
        assert set(instructions) == {"m16n8k16.row.col.f32.bf16.bf16.f32"}
    else:
        assert set(instructions) == {f"m64n{tile.n * tile.m // 16 // tile.warps}k16.f32.bf16.bf16"}
    assert not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (
            _rotary_kernel,
            dict.fromkeys(("q_ptr", "k_ptr", "table_ptr", "q_out_ptr", "k_out_ptr"), BF16) | {"positions_ptr": "*i64"},
            {"Q_HEADS": 28, "Q_TILE": 32, "K_HEADS": 4, "K_TILE": 4, "HALF": 64, "REST": 0, "REST_TILE": 1}
            | {"INVERSE": False},
        ),
        (
            _norm_rotary_kernel,
            dict.fromkeys(
                ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "table_ptr", "q_out_ptr", "k_out_ptr"), BF16
            )
            | dict.fromkeys(("q_rstd_ptr", "k_rstd_ptr"), FP32)
            | {"positions_ptr": "*i64", "eps": "fp32"},
            {"Q_HEADS": 28, "K_HEADS": 4, "D": 128, "WIDTH": 128, "UNIT_OFFSET": False, "HEADS": HEADS_OF_A_PROGRAM}
            | dict.fromkeys(("Q_TOKEN", "K_TOKEN"), 4608)
            | dict.fromkeys(("Q_HEAD", "K_HEAD"), 128),
        ),
        (
            _backward_kernel,
            dict.fromkeys(("dy_ptr", "x_ptr", "weight_ptr", "dx_ptr"), BF16)
            | dict.fromkeys(("rstd_ptr", "dw_ptr"), FP32),
            {"K": 128, "TILE": 128, "ROWS": 16, "UNIT_OFFSET": False},
        ),
        (_silu_mul_kernel, dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), BF16), {"TILE": 1024}),
        (
            _silu_mul_backward_kernel,
            dict.fromkeys(("dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr"), BF16),
            {"TILE": 1024},
        ),
        (
            _sigmoid_mul_kernel,
            dict.fromkeys(("x_ptr", "gate_ptr", "y_ptr"), BF16) | {"qdata_ptr": "*u8", "scales_ptr": FP32},
            {"D": 256, "GROUPS": 32, "WITH_Y": True, "QUANTIZE": True, "POW2": False},
        ),
        (
            _sigmoid_mul_backward_kernel,
            dict.fromkeys(("dy_ptr", "x_ptr", "gate_ptr", "dx_ptr", "dgate_ptr"), BF16),
            {"D": 256, "GROUPS": 32},
        ),
        (_chunk_kernel, OF_ROWS, {"CHUNK": CHUNK, "ROWS_TOGETHER": ROWS_TOGETHER}),
        (_combine_kernel, OF_ROWS, {"LANES": LANES}),
        (_pick_kernel, OF_ROWS, {"PICKED": PICKED}),
        (_gradient_kernel, OF_ROWS, {"CHUNK": CHUNK}),
        (_draw_kernel, OF_ROWS, {"CHUNK": CHUNK, "CHUNKS": 1}),
        (_draw_kernel, OF_ROWS, {"CHUNK": CHUNK, "CHUNKS": 64}),
        (_rank_kernel, OF_ROWS, {"CHUNK": CHUNK}),
        (_one_kernel, OF_BLOCKS, {"BLOCK": 128}),
        (_many_kernel, OF_BLOCKS, {"HALVINGS": 8, "BLOCK": 128}),
        (conv._conv_kernel, OF_THE_CONV, {"TOKENS": 16, "CHANNELS": 256, "stride_channel": 1}),
        (conv._conv_kernel, OF_THE_CONV, {"TOKENS": 4, "CHANNELS": 1024, "stride_channel": 1}),
        (conv._conv_backward_kernel, OF_THE_CONV, {"TOKENS": 64, "CHANNELS": 128}),
        (norm._gated_norm_kernel, OF_THE_NORM, {"HEADS": 8, "WITH_Y": True, "QUANTIZE": True, "POW2": False}),
        (norm._gated_norm_backward_kernel, OF_THE_NORM, {"HEADS": 16}),
    ],
    ids=lambda value: value.__name__.strip("_") if hasattr(value, "__name__") else "",
)
def test_kernels_compile_for_hopper_without_atomics(kernel, types, constants):
    ptx = ptx_for_hopper(kernel, types, constants, num_warps=WARPS if "CHUNK" in constants else 4)
    assert ".entry" in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)


def test_a_token_of_the_delta_rule_waits_for_no_other_warp():
    """Sums over keys are in a thread and between eight lanes, in one order whatever the values of a thread."""
    lanes = []
    for shared, neighbors in rule._MOST_REGISTERS:
        constants = {"SHARED": shared, "PAIRED": neighbors == 2, "NEIGHBORS": neighbors, **rule._LAYOUT}
        types = OF_THE_RULE | {"states_ptr": "*i64" if neighbors == 2 else FP32}
        ptx = ptx_for_hopper(rule._rule_kernel, types, constants, num_warps=4)
        assert not re.search(r"\bbar\.sync|\.shared\b", ptx)
        lanes.append(ptx.count("shfl.sync.bfly"))
        if shared:  # products of 16 keys a value and sum: four chains of one product and three fused ones
            assert ptx.count("fma.rn.f32") == neighbors * (2 * 12 + 16) + 2 * neighbors and ptx.count("ex2.approx") == 0
    # Of two sums in each value, three steps of lanes; of both norms and their product.
    assert lanes == [12, 24, 12 + 9]
    shared = {"HEADS": 2, "TOKENS": rule._TOKENS} | {name: rule._LAYOUT[name] for name in ("LANES", "WARPS", "WORDS")}
    assert ptx_for_hopper(rule._shared_kernel, OF_THE_RULE, shared, num_warps=4).count("shfl.sync.bfly") == 9


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
    kernel, options = getattr(gradient, f"_{name}_kernel"), {n: x for n, x in launch.items() if n.islower()}
    of_rule = dict.fromkeys(("cu_ptr", "places_ptr"), "*i32") | dict.fromkeys(
        ("b_ptr", "a_ptr", "norms_ptr", "gates_ptr", "db_ptr", "da_ptr", "of_heads_ptr"), FP32
    )
    types = {n: of_rule.get(n, BF16 if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
    constants = {n: x for n, x in launch.items() if n.isupper()}
    compiled, cubin = compiled_for_hopper(kernel, types, constants, **options), tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    assert not re.search(r"\b(STL|LDL|ATOM\w*|RED)\b", disassembled(cubin))
    assert compiled.metadata.shared <= 113 * 2**10
    assert ("wgmma" in compiled.asm["ptx"]) == (name != "places")

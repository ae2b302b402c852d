# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""PTX and machine code for Hopper of kernels that transpose and operations that quantize; needs no GPU."""

import re

import pytest
import triton
from slow import slow
from test_triton_for_hopper import machine_code_for_hopper, ptx_for_hopper

from jetrl_verl.kernels.norm_rotary import _norm_rotary_kernel
from jetrl_verl.kernels.norm_rotary_write import _norm_rotary_write_kernel
from jetrl_verl.kernels.quantize_1x128 import _quantize_both_kernel
from jetrl_verl.kernels.quantize_128x128 import _quantize_128x128_kernel
from jetrl_verl.kernels.relayout_128x1 import _LAUNCH as RELAYOUT
from jetrl_verl.kernels.relayout_128x1 import _relayout_kernel
from jetrl_verl.kernels.rms_norm import _ROWS_IN_FLIGHT, _rms_norm_kernel, tile_and_warps
from jetrl_verl.kernels.silu_mul import (
    _silu_mul_backward_quantize_kernel,
    _silu_mul_quantize_kernel,
)
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM

BF16, FP32, QDATA, PAIRS, WORDS = "*bf16", "*fp32", "*u8", "*i16", "*i32"


def types_of(kernel) -> dict[str, str]:
    """Types of a kernel's arguments, by their names."""
    words = {"colwise_qdata_ptr", "dgate_colwise_qdata_ptr", "dup_colwise_qdata_ptr", "out_qdata_ptr"}

    def type_of(name: str) -> str:
        if name == "scales_t_ptr" or name.endswith(("rstd_ptr", "scales_ptr")):
            return FP32
        if name in ("positions_ptr", "slots_ptr"):
            return "*i64"
        if name == "row_ptr":
            return "*i32"
        if name in words:
            return WORDS
        if name.endswith("words_ptr"):
            return WORDS
        if name.endswith("pairs_ptr"):
            return PAIRS
        if name.endswith("qdata_ptr"):
            return QDATA
        return BF16 if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"

    return {name: type_of(name) for name in kernel.arg_names}


TRANSPOSING = {
    "1x128 and 128x1": (_quantize_both_kernel, {"WITH_ROWWISE": True}),
    "re-layout": (_relayout_kernel, {"COLUMNS": RELAYOUT["COLUMNS"]}),
    "128x128 and transpose": (_quantize_128x128_kernel, {"TRANSPOSE": True}),
    "SiLU-mul backward": (_silu_mul_backward_quantize_kernel, {}),
}


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("name", TRANSPOSING)
def test_qdata_are_transposed_as_words_and_stored_16_bytes_at_a_time(name, pow2):
    kernel, constants = TRANSPOSING[name]
    warps = RELAYOUT["num_warps"] if name == "re-layout" else 8
    ptx = ptx_for_hopper(kernel, types_of(kernel), constants | {"POW2": pow2}, num_warps=warps)
    assert "shared" in ptx
    assert not re.search(r"(ld|st)\.shared\S*\.[bu](8|16)\b", ptx)
    assert not re.search(r"(ld|st)\.global\S*\.[bu]8\b", ptx)
    assert "st.global.v4.b32" in ptx
    # SiLU divides, at full rate; the qdata never do.
    assert len(re.findall(r"div\.(rn|full)\.f32", ptx)) == {"SiLU-mul backward": 64}.get(name, 0)


@pytest.mark.parametrize("pow2", [True, slow(False)])
@pytest.mark.parametrize("name", [*TRANSPOSING, "128x128"])
def test_the_kernels_compile_for_ada(name, pow2):
    """Ada's assembler, the last step of every compilation here, refuses instructions that only Hopper has."""
    kernel, constants = TRANSPOSING.get(name, (_quantize_128x128_kernel, {"TRANSPOSE": False}))
    warps = RELAYOUT["num_warps"] if name == "re-layout" else 8
    ptx = ptx_for_hopper(kernel, types_of(kernel), constants | {"POW2": pow2}, 89, num_warps=warps)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "max.u16x2" not in ptx


@pytest.mark.parametrize("with_y", [True, False])
def test_silu_mul_reads_16_bytes_at_a_time(with_y):
    constants = {"WITH_Y": with_y, "POW2": False, "GROUPS": 32}
    ptx = ptx_for_hopper(_silu_mul_quantize_kernel, types_of(_silu_mul_quantize_kernel), constants, num_warps=4)
    assert ptx.count("ld.global.v4.b32") == 8
    assert not re.search(r"ld\.global\.b(8|16|32)\b", ptx)


@pytest.mark.parametrize("name", ["norm", "residual sum and norm", "experts' rows, residual sum and norm", "SiLU-mul"])
def test_kernels_before_a_linear_launch_their_dependents_at_once(name):
    if name == "SiLU-mul":
        kernel, constants = _silu_mul_quantize_kernel, {"WITH_Y": False, "POW2": False, "GROUPS": 32}
    else:
        kernel, constants = _rms_norm_kernel, {"K": 4096, "TILE": 4096, "HEADS": 1, "STRIDE_TOKEN": 4096}
        constants |= {"SLOTS": 8 if name == "experts' rows, residual sum and norm" else 0}
        constants |= {"STRIDE_HEAD": 4096, "RESIDUAL": name != "norm", "UNIT_OFFSET": False}
        constants |= {"WITH_Y": False, "QUANTIZE": True, "POW2": False}
    ptx = ptx_for_hopper(kernel, types_of(kernel), constants, num_warps=8)
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.launch_dependents" not in ptx[ptx.index("ld.global") :]
    assert "griddepcontrol.wait" not in ptx


def sums_of_squares(
    monkeypatch, kernel, constants: dict, tile: int, warps: int, heads: int = 0, **types: str
) -> list[tuple[str, list[str]]]:
    """Layout of each sum over ``tile`` numbers in a kernel and the instructions before its root, which fix its bits.
    With ``heads`` there are so many rows, each in its own warps, and the layout is that of one row."""
    compiled, stock = [], triton.compile

    def compile_and_keep(*args, **options):
        compiled.append(stock(*args, **options))
        return compiled[-1]

    with monkeypatch.context() as patched:
        patched.setattr(triton, "compile", compile_and_keep)
        ptx = ptx_for_hopper(kernel, types_of(kernel) | types, constants, num_warps=warps)
    ir = compiled[-1].asm["ttgir"]
    shape = f"{heads}x{tile}xf32" if heads else f"{tile}xf32"
    names = re.findall(rf"\(tensor<{shape}, (#\w+)>\) -> ", ir)
    layouts = [re.search(rf"^{name} = (.*)$", ir, re.MULTILINE).group(1) for name in names]
    if heads:
        rows = {"sizePerThread": 1, "threadsPerWarp": 1, "warpsPerCTA": heads}
        for name, size in rows.items():
            layouts = [re.sub(rf"{name} = \[{size}, (\d+)\]", rf"{name} = [\1]", layout) for layout in layouts]
        layouts = [
            layout.replace("warpsPerCTA = [1]", f"warpsPerCTA = [{warps // heads}]").replace("[1, 0]", "[0]")
            for layout in layouts
        ]
    instructions = r"\b((?:fma|mul|add|sub|div)\.[a-z.]*f32|shfl\.sync\.bfly|ld\.global\S*)"
    before_roots = re.split(r"sqrt\S*", ptx)[: len(names)]
    return [(layout, re.findall(instructions, part)) for layout, part in zip(layouts, before_roots, strict=True)]


OF_HEADS = {"D": 128, "WIDTH": 128, "UNIT_OFFSET": False}


@pytest.mark.parametrize(("width", "rotated", "unit_offset"), [(128, 128, False), (64, 64, False), (256, 64, True)])
def test_norm_rotary_sums_squares_as_the_norm(monkeypatch, width, rotated, unit_offset):
    """Queries, then keys: the layout, and the arithmetic and shuffles from the squares to the sum."""

    def computed(layout: str, names: list[str]) -> tuple[str, list[str]]:
        names = [name for name in names if not name.startswith("ld.")]
        first, last = names.index("shfl.sync.bfly"), len(names) - names[::-1].index("shfl.sync.bfly")
        squares = [name for name in names[:first] if name != "add.f32"]  # which is 1 + weight
        return layout, squares[-width // 32 :] + names[first : last + 1]

    tile, warps = tile_and_warps(width)
    heads = {"HEADS": 32, "STRIDE_TOKEN": 5120, "STRIDE_HEAD": width}
    norm = {
        "K": width,
        "TILE": tile,
        **heads,
        "SLOTS": 0,
        "RESIDUAL": False,
        "UNIT_OFFSET": unit_offset,
        "WITH_Y": True,
        "QUANTIZE": False,
        "POW2": False,
    }
    (plain,) = sums_of_squares(monkeypatch, _rms_norm_kernel, norm, tile, warps)
    of_heads = {"D": width, "WIDTH": rotated, "UNIT_OFFSET": unit_offset}
    both = {"Q_HEADS": 32, "K_HEADS": 4, "Q_TOKEN": 5120, "K_TOKEN": 5120, "Q_HEAD": 512, "K_HEAD": width} | of_heads
    of_program = HEADS_OF_A_PROGRAM
    both["HEADS"] = of_program
    fused = sums_of_squares(monkeypatch, _norm_rotary_kernel, both, tile, of_program * warps, of_program)
    assert len(fused) == 2 and len(computed(*plain)[1]) == width // 32 + 2 * 5
    assert [computed(*one) for one in fused] == [computed(*plain)] * 2
    for fp8, cache in ((False, BF16), (True, QDATA))[: 1 + (width == 128)]:
        constants, types = heads_and_cache(32, 4, fp8, **of_heads), dict.fromkeys(("keys_ptr", "values_ptr"), cache)
        kernel = _norm_rotary_write_kernel
        written = sums_of_squares(monkeypatch, kernel, constants, tile, of_program * warps, of_program, **types)
        assert [computed(*one) for one in written] == [computed(*plain)] * 2


def heads_and_cache(heads: int, kv_heads: int, fp8: bool, **of_heads: object) -> dict[str, object]:
    """Constants of a launch that writes the cache: merged projection, pages of 16 tokens."""
    of_heads = OF_HEADS | of_heads
    width = of_heads["D"]
    merged = (heads + 2 * kv_heads) * width
    layout = {"PAGE": 2 * 16 * kv_heads * width, "PLACE": kv_heads * width, "HEAD": width}
    return {
        **{"Q_HEADS": heads, "Q_TOKEN": merged, "Q_HEAD": width, "KV_HEADS": kv_heads, "BLOCK_SIZE": 16},
        **of_heads,
        **{f"{x}_TOKEN": merged for x in "KV"},
        **{f"{x}_HEAD": width for x in "KV"},
        **(dict.fromkeys(layout, 0) if fp8 else layout),
        "FP8": fp8,
        "HEADS": HEADS_OF_A_PROGRAM,
    }


@pytest.mark.parametrize("fp8", [False, True])
def test_norm_rotary_write_stores_under_masks_and_needs_no_barrier(fp8):
    """Stores of queries in two halves, then keys, then values; with FP8 two E4M3 a store, and a head's scale."""
    types = types_of(_norm_rotary_write_kernel) | (dict.fromkeys(("keys_ptr", "values_ptr"), QDATA) if fp8 else {})
    ptx = ptx_for_hopper(_norm_rotary_write_kernel, types, heads_and_cache(32, 4, fp8), num_warps=HEADS_OF_A_PROGRAM)
    stores = [
        (bool(predicate), width) for predicate, width in re.findall(r"(@%p\d+ )?st\.global\.((?:v2\.)?b\d+)", ptx)
    ]
    halves = [(True, "b16"), (True, "b16"), (True, "b8")] if fp8 else [(True, "b32")] * 2
    assert stores == [(True, "b32")] * 2 + halves + (halves if fp8 else [(True, "v2.b32")])
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == (4 if fp8 else 0)
    assert not re.search(r"bar\.sync|\b(atom|red)\.", ptx)
    assert fp8 or not re.search(r"(ld|st)\.shared", ptx)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("k", [128, 1536, 4096, 5120, 12288])
def test_every_variant_of_the_norm_sums_squares_alike(monkeypatch, k, residual):
    """The layout and the instructions fix the bits of a sum.

    Variants: with qdata, with and without the BF16 rows; any number of heads in a wider tensor.
    """
    tile, warps = tile_and_warps(k)

    def sum_of_squares(**changes) -> list[tuple[str, list[str]]]:
        constants = {"K": k, "TILE": tile, "HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k}
        constants |= {"SLOTS": 0, "RESIDUAL": residual, "UNIT_OFFSET": False}
        constants |= {"WITH_Y": True, "QUANTIZE": False, "POW2": False} | changes
        return sums_of_squares(monkeypatch, _rms_norm_kernel, constants, tile, warps)[0]

    plain = sum_of_squares()
    assert "shfl.sync.bfly" in plain[1]

    def without_additions(layout: str, names: list[str]) -> tuple[str, list[str]]:
        """Of the residual and of 1 + weight; a thread's squares are added by ``fma``."""
        first = names.index("shfl.sync.bfly")
        return layout, [name for name in names[:first] if name != "add.f32"] + names[first:]

    assert without_additions(*sum_of_squares(UNIT_OFFSET=True)) == without_additions(*plain)
    for with_y in (True, False):
        assert sum_of_squares(WITH_Y=with_y, QUANTIZE=True) == plain
    if not residual:
        for heads, token, head in ((8, 12 * k, k), (7, 11 * (k + 8), k + 8)):
            assert sum_of_squares(HEADS=heads, STRIDE_TOKEN=token, STRIDE_HEAD=head) == plain
        # Of such heads the launch makes a copy.
        assert sum_of_squares(HEADS=8, STRIDE_TOKEN=12 * k + 1, STRIDE_HEAD=k) != plain


def norm_after_experts(k: int, slots: int, **changes) -> tuple:
    """Constants of the norm after ``slots`` experts' rows of a token, tile, warps."""
    tile, warps = tile_and_warps(k)
    constants = {"K": k, "TILE": tile, "HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k, "SLOTS": slots}
    constants |= {"RESIDUAL": True, "UNIT_OFFSET": False, "WITH_Y": False, "QUANTIZE": True, "POW2": False} | changes
    return constants, tile, warps


@pytest.mark.parametrize("changes", [{}, {"WITH_Y": True, "QUANTIZE": False}], ids=["qdata", "rows"])
@pytest.mark.parametrize(("k", "slots"), [(768, 8), (2048, 1), (2048, 2), (2048, 8), (4096, 8)])
def test_combine_add_rms_norm_sums_squares_as_the_norm(monkeypatch, k, slots, changes):
    """The additions of the rows come before the instructions of the plain norm; nothing else differs."""

    def computed(slots: int) -> tuple[str, list[str]]:
        call = norm_after_experts(k, slots, **changes)
        ((layout, names),) = sums_of_squares(monkeypatch, _rms_norm_kernel, *call)
        return layout, [name for name in names if not name.startswith("ld.")]

    (layout, plain), (own_layout, fused) = computed(0), computed(slots)
    _, tile, warps = norm_after_experts(k, slots)
    added = len(fused) - len(plain)
    assert own_layout == layout and fused[added:] == plain and "shfl.sync.bfly" in plain
    # Of two numbers the sum is one of BF16 numbers, which rounds alike in BF16: two in an instruction.
    per_thread = tile // (32 * warps)
    assert fused[:added] == ["add.f32"] * (per_thread * (slots - 1) if slots > 2 else 0)


@pytest.mark.parametrize(("k", "slots"), [(768, 8), (2048, 2), (2048, 8), (4096, 8), (8192, 8)])
def test_combine_add_rms_norm_loads_all_rows_before_it_adds(tmp_path, k, slots):
    """Weight and residual are loaded before the row numbers: two loads of 16 bytes a thread of each."""
    constants, _, warps = norm_after_experts(k, slots)
    call = _rms_norm_kernel, types_of(_rms_norm_kernel), constants
    code = machine_code_for_hopper(tmp_path, *call, num_warps=warps, **_ROWS_IN_FLIGHT)
    instructions = re.findall(r"\b(LDG\.E(?:\.128)?|FADD|H?FMA\S*|HADD2\S*|BAR)(?=[. ])", code)
    loads, barrier = [name for name in instructions if name.startswith("LDG")], instructions.index("BAR")
    assert instructions[:barrier] == ["LDG.E.128"] * 4
    assert instructions[barrier + 1 :][: 3 * slots] == ["LDG.E"] * slots + ["LDG.E.128"] * 2 * slots
    assert len(loads) == 4 + 3 * slots and "STL" not in code

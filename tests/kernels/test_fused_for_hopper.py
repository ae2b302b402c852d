# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""PTX and machine code for Hopper of kernels that transpose and operations that quantize; needs no GPU."""

import re

import pytest
from hopper import compiled, machine_code_of, ptx_of
from slow import slow

from jetrl_verl.kernels.relayout_128x1 import _LAUNCH as RELAYOUT
from jetrl_verl.kernels.rms_norm import _ROWS_IN_FLIGHT, tile_and_warps
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM

NORM, HEADS = "rms_norm._rms_norm_kernel", "norm_rotary._norm_rotary_kernel"
WRITE, SILU_MUL = "norm_rotary_write._norm_rotary_write_kernel", "silu_mul._silu_mul_quantize_kernel"


def norm(k: int, **changes: object) -> dict[str, object]:
    """Constants of the norm of rows of ``k`` numbers: the BF16 rows alone."""
    constants = {"K": k, "TILE": tile_and_warps(k)[0], "HEADS": 1, "STRIDE_TOKEN": k, "STRIDE_HEAD": k, "SLOTS": 0}
    constants |= {"RESIDUAL": False, "UNIT_OFFSET": False, "WITH_Y": True, "QUANTIZE": False, "POW2": False}
    return constants | changes


def norm_after_experts(k: int, slots: int, **changes: object) -> dict[str, object]:
    """Constants of the norm, quantized, of ``slots`` experts' rows of a token and the residual."""
    return norm(k, **{"SLOTS": slots, "RESIDUAL": True, "WITH_Y": False, "QUANTIZE": True} | changes)


TRANSPOSING = {
    "1x128 and 128x1": ("quantize_1x128._quantize_both_kernel", {"WITH_ROWWISE": True}),
    "re-layout": ("relayout_128x1._relayout_kernel", {"COLUMNS": RELAYOUT["COLUMNS"]}),
    "128x128 and transpose": ("quantize_128x128._quantize_128x128_kernel", {"TRANSPOSE": True}),
    "SiLU-mul backward": ("silu_mul._silu_mul_backward_quantize_kernel", {}),
}


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("name", TRANSPOSING)
def test_qdata_are_transposed_as_words_and_stored_16_bytes_at_a_time(name, pow2):
    kernel, constants = TRANSPOSING[name]
    warps = RELAYOUT["num_warps"] if name == "re-layout" else 8
    ptx = ptx_of(kernel, constants | {"POW2": pow2}, num_warps=warps)
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
    kernel, constants = TRANSPOSING.get(name, ("quantize_128x128._quantize_128x128_kernel", {"TRANSPOSE": False}))
    warps = RELAYOUT["num_warps"] if name == "re-layout" else 8
    ptx = ptx_of(kernel, constants | {"POW2": pow2}, capability=89, num_warps=warps)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "max.u16x2" not in ptx


@pytest.mark.parametrize("with_y", [True, False])
def test_silu_mul_reads_16_bytes_at_a_time(with_y):
    constants = {"WITH_Y": with_y, "POW2": False, "GROUPS": 32}
    ptx = ptx_of(SILU_MUL, constants, num_warps=4)
    assert ptx.count("ld.global.v4.b32") == 8
    assert not re.search(r"ld\.global\.b(8|16|32)\b", ptx)


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (NORM, norm(4096, WITH_Y=False, QUANTIZE=True)),
        (NORM, norm_after_experts(4096, slots=0)),
        (NORM, norm_after_experts(4096, slots=8)),
        (SILU_MUL, {"WITH_Y": False, "POW2": False, "GROUPS": 32}),
    ],
    ids=["norm", "residual sum and norm", "experts' rows, residual sum and norm", "SiLU-mul"],
)
def test_kernels_before_a_linear_launch_their_dependents_at_once(kernel, constants):
    ptx = ptx_of(kernel, constants, num_warps=8)
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.launch_dependents" not in ptx[ptx.index("ld.global") :]
    assert "griddepcontrol.wait" not in ptx


def sums_of_squares(
    kernel: str, constants: dict, tile: int, warps: int, heads: int = 0, types=()
) -> list[tuple[str, list[str]]]:
    """Layout of each sum over ``tile`` numbers in a kernel and the instructions before its root, which fix its bits.
    With ``heads`` there are so many rows, each in its own warps, and the layout is that of one row."""
    code = compiled(kernel, constants, types=types, num_warps=warps).asm
    ir = code["ttgir"]
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
    before_roots = re.split(r"sqrt\S*", code["ptx"])[: len(names)]
    return [(layout, re.findall(instructions, part)) for layout, part in zip(layouts, before_roots, strict=True)]


def arithmetic(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("ld.")]


OF_HEADS = {"D": 128, "WIDTH": 128, "UNIT_OFFSET": False, "HEADS": HEADS_OF_A_PROGRAM}
CACHE = {False: {}, True: {"keys_ptr": "*u8", "values_ptr": "*u8"}}
"""Whether it is of FP8 -> types of its pointers."""


@pytest.mark.parametrize(("width", "rotated", "unit_offset"), [(128, 128, False), (64, 64, False), (256, 64, True)])
def test_norm_rotary_sums_squares_as_the_norm(width, rotated, unit_offset):
    """Queries, then keys: the layout, and the arithmetic and shuffles from the squares to the sum."""

    def computed(layout: str, names: list[str]) -> tuple[str, list[str]]:
        names = arithmetic(names)
        first, last = names.index("shfl.sync.bfly"), len(names) - names[::-1].index("shfl.sync.bfly")
        squares = [name for name in names[:first] if name != "add.f32"]  # which is 1 + weight
        return layout, squares[-width // 32 :] + names[first : last + 1]

    tile, warps = tile_and_warps(width)
    of_norm = norm(width, HEADS=32, STRIDE_TOKEN=5120, UNIT_OFFSET=unit_offset)
    (plain,) = sums_of_squares(NORM, of_norm, tile, warps)
    of_heads = {"D": width, "WIDTH": rotated, "UNIT_OFFSET": unit_offset, "HEADS": HEADS_OF_A_PROGRAM}
    both = {"Q_HEADS": 32, "K_HEADS": 4, "Q_TOKEN": 5120, "K_TOKEN": 5120, "Q_HEAD": 512, "K_HEAD": width} | of_heads
    of_program = tile, HEADS_OF_A_PROGRAM * warps, HEADS_OF_A_PROGRAM
    fused = sums_of_squares(HEADS, both, *of_program)
    assert len(fused) == 2 and len(computed(*plain)[1]) == width // 32 + 2 * 5
    assert [computed(*one) for one in fused] == [computed(*plain)] * 2
    for fp8 in (False, True)[: 1 + (width == 128)]:
        written = sums_of_squares(WRITE, heads_and_cache(32, 4, fp8, **of_heads), *of_program, CACHE[fp8])
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
    }


@pytest.mark.parametrize("fp8", [False, True])
def test_norm_rotary_write_stores_under_masks_and_needs_no_barrier(fp8):
    """Stores of queries in two halves, then keys, then values; with FP8 two E4M3 a store, and a head's scale."""
    ptx = ptx_of(WRITE, heads_and_cache(32, 4, fp8), types=CACHE[fp8], num_warps=HEADS_OF_A_PROGRAM)
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
def test_every_variant_of_the_norm_sums_squares_alike(k, residual):
    """The layout and the instructions fix the bits of a sum.

    Variants: with qdata, with and without the BF16 rows; any number of heads in a wider tensor.
    """
    tile, warps = tile_and_warps(k)

    def sum_of_squares(**changes) -> tuple[str, list[str]]:
        return sums_of_squares(NORM, norm(k, **{"RESIDUAL": residual} | changes), tile, warps)[0]

    plain = sum_of_squares()
    assert "shfl.sync.bfly" in plain[1]

    def without_additions(layout: str, names: list[str]) -> tuple[str, list[str]]:
        """Of the residual and of 1 + weight; a thread's squares are added by ``fma``."""
        first = names.index("shfl.sync.bfly")
        return layout, [name for name in names[:first] if name != "add.f32"] + names[first:]

    assert without_additions(*sum_of_squares(UNIT_OFFSET=True)) == without_additions(*plain)
    for with_y in (True, False):
        assert sum_of_squares(WITH_Y=with_y, QUANTIZE=True) == plain
    if residual:  # whose sum before it is one BF16 addition, bitwise an FP32 addition rounded to BF16
        layout, names = sum_of_squares(RESIDUAL=False)
        assert (layout, arithmetic(names)) == (plain[0], arithmetic(plain[1]))
    else:
        for heads, token, head in ((8, 12 * k, k), (7, 11 * (k + 8), k + 8)):
            assert sum_of_squares(HEADS=heads, STRIDE_TOKEN=token, STRIDE_HEAD=head) == plain
        # Of such heads the launch makes a copy.
        assert sum_of_squares(HEADS=8, STRIDE_TOKEN=12 * k + 1, STRIDE_HEAD=k) != plain


@pytest.mark.parametrize("changes", [{}, {"WITH_Y": True, "QUANTIZE": False}], ids=["qdata", "rows"])
@pytest.mark.parametrize(("k", "slots"), [(768, 8), (2048, 1), (2048, 2), (2048, 8), (4096, 8)])
def test_combine_add_rms_norm_sums_squares_as_the_norm(k, slots, changes):
    """The additions of the rows come before the instructions of the plain norm; nothing else differs."""

    tile, warps = tile_and_warps(k)

    def computed(slots: int) -> tuple[str, list[str]]:
        ((layout, names),) = sums_of_squares(NORM, norm_after_experts(k, slots, **changes), tile, warps)
        return layout, arithmetic(names)

    (layout, plain), (own_layout, fused) = computed(0), computed(slots)
    added = len(fused) - len(plain)
    assert own_layout == layout and fused[added:] == plain and "shfl.sync.bfly" in plain
    # Of two numbers the sum is one of BF16 numbers, which rounds alike in BF16: two in an instruction.
    per_thread = tile // (32 * warps)
    assert fused[:added] == ["add.f32"] * (per_thread * (slots - 1) if slots > 2 else 0)


@pytest.mark.parametrize(("k", "slots"), [(768, 8), (2048, 2), (2048, 8), (4096, 8), (8192, 8)])
def test_combine_add_rms_norm_loads_all_rows_before_it_adds(tmp_path, k, slots):
    """Weight and residual are loaded before the row numbers: two loads of 16 bytes a thread of each."""
    options = {"num_warps": tile_and_warps(k)[1], **_ROWS_IN_FLIGHT}
    code = machine_code_of(compiled(NORM, norm_after_experts(k, slots), **options), tmp_path)
    instructions = re.findall(r"\b(LDG\.E(?:\.128)?|FADD|H?FMA\S*|HADD2\S*|BAR)(?=[. ])", code)
    loads, barrier = [name for name in instructions if name.startswith("LDG")], instructions.index("BAR")
    assert instructions[:barrier] == ["LDG.E.128"] * 4
    assert instructions[barrier + 1 :][: 3 * slots] == ["LDG.E"] * slots + ["LDG.E.128"] * 2 * slots
    assert len(loads) == 4 + 3 * slots and "STL" not in code

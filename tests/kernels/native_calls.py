# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A call of each native operator, and changes to it for which csrc/binding.cpp raises, with the messages."""

from collections.abc import Callable

import native_emulator
import torch
from native_emulator import experts_operand, operands, silu_operands
from tensors import packed
from test_delta_net_on_cpu import inputs as delta_inputs

from jetrl_verl import kernels, reference
from jetrl_verl.reference import BLOCK


def arguments_of(operator: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """(all arguments of a supported call of ``operator``, those that it writes, filled with NaN or qdata 0x5A)."""
    block_scaled = operator != "wgrad"
    a, b = operands(20, 144, 272, block_scaled)

    def fresh(rows: int, columns: int, dtype=torch.uint8) -> torch.Tensor:
        return torch.full((rows, columns), torch.nan if dtype.is_floating_point else 0x5A, dtype=dtype)

    if operator in ("fprop", "decode"):
        arguments = dict(zip(("x", "x_scales", "w", "w_scales"), (*a, *b)), bias=None, block=0, cluster=0)
        results = {"y": fresh(20, 144, torch.bfloat16)}
    elif operator == "fprop_of_ranks":
        a, b = operands(20, 144, 2 * BLOCK, True)
        arguments = dict(zip(("x", "x_scales", "w", "w_scales"), (*a, *b)), ranks=2, block=0, cluster=0)
        results = {"y": fresh(20, 144, torch.bfloat16)}
    elif operator == "wgrad":
        arguments = dict(zip(("a", "a_scales", "b", "b_scales"), (*a, *b)), block=0, cluster=0)
        results = {"dw": fresh(20, 144, torch.float32)}
    elif operator in ("grouped_fprop", "grouped_decode"):
        a, b = native_emulator.operand(20, 2 * BLOCK, 20, 0), experts_operand(3, BLOCK, 2 * BLOCK, 0, False)
        start = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
        operands_of = dict(zip(("x", "x_scales", "w", "w_scales"), (*a, *b)), start=start, aligned=False)
        arguments = operands_of | dict(slices=1, block=0, cluster=0)
        results = {"y": fresh(20, BLOCK, torch.bfloat16)}
    elif operator == "grouped_wgrad":
        a, b = (native_emulator.operand(columns, 2 * BLOCK, columns, seed) for columns, seed in ((20, 0), (144, 1)))
        start = torch.tensor([0, 0, BLOCK, 2 * BLOCK], dtype=torch.int32)
        arguments = dict(zip(("a", "a_scales", "b", "b_scales"), (*a, *b)), start=start, block=0, cluster=0)
        results = {"dw": torch.full((3, 20, 144), torch.nan, dtype=torch.bfloat16)}
    elif operator == "decode_attention":
        arguments = decode_call() | {"units": 1, "cluster": 1}
        results = {"out": arguments.pop("out")}
    elif operator == "decode_attention_bf16":
        arguments = decode_call_bf16() | {"cluster": 1}
        results = {"out": arguments.pop("out")}
    elif operator == "delta_rule":
        qkv, b, a, _, _, a_log, dt_bias, _ = delta_inputs(3)
        arguments = dict(qkv=qkv, b=b, a=a, a_log=a_log, dt_bias=dt_bias.bfloat16(), cu_seqlens=packed(2, 1))
        arguments |= dict(slots=torch.tensor([1, -1], dtype=torch.int32), computed=torch.zeros(2, dtype=torch.int32))
        results = {"states": torch.full((2, 4, 193, BLOCK), torch.nan)}
        results |= {"out": torch.full((3, 4, BLOCK), torch.nan).bfloat16()}
    elif operator == "relayout":
        arguments = {"qdata": a.qdata, "scales": a.scales, "pow2": False}
        results = {"out": fresh(272, BLOCK), "out_scales": fresh(1, 272, torch.float32)}
    elif operator == "transpose":
        arguments = {"qdata": b.qdata, "scales": b.scales}
        results = {"out": fresh(272, 144), "out_scales": fresh(3, 2, torch.float32)}
    else:
        arguments = dict(zip(("dy", "gate", "up"), silu_operands(20, 256, 0)), pow2=False)
        results = {}
        for of in ("dgate", "dup"):
            results |= {of: fresh(20, 256), f"{of}_scales": fresh(2, 20, torch.float32)}
            results |= {f"{of}_columns": fresh(256, BLOCK), f"{of}_column_scales": fresh(1, 256, torch.float32)}
    return arguments | results, results


def decode_call(**changes) -> dict[str, torch.Tensor]:
    """Two requests of 20 and 3 tokens, 4 query heads over 2 KV heads, in pages of 16."""
    k, v, q = (torch.randn(23, heads, 128).bfloat16() for heads in (2, 2, 4))
    cache = torch.full(reference.cache_shape(3, 16, 2), 255, dtype=torch.uint8)
    slots = torch.cat([torch.arange(16) + 32, torch.arange(4), torch.arange(3) + 16])
    reference.write_cache(cache, reference.quantize_heads(k), reference.quantize_heads(v), slots)
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    call = {"q": q[:2], "cache": cache, "lengths": lengths, "block_table": table, "scale": 128**-0.5}
    return call | {"out": torch.full((2, 4, 128), torch.nan, dtype=torch.bfloat16)} | changes


def decode_call_bf16(**changes) -> dict[str, torch.Tensor]:
    """The same over BF16 pages, between NaN."""
    call = decode_call()
    keys, values = reference.read_cache(call.pop("cache"))
    keys, values = (kernels.cache_form(x.transpose(1, 2).contiguous()) for x in (keys, values))
    keys[[0, 1], [4, 3]] = values[[0, 1], [4, 3]] = torch.nan
    return {"q": call.pop("q"), "keys": keys, "values": values} | call | changes


def is_untouched(x: torch.Tensor) -> bool:
    return bool((x == 0x5A).all() if x.dtype == torch.uint8 else x.isnan().all())


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, at an address 4 bytes further."""
    step = 4 // x.itemsize
    moved = torch.empty(x.untyped_storage().nbytes() // x.itemsize + 16, dtype=x.dtype)
    return moved.as_strided(x.shape, x.stride(), step)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same shape with every other element of memory left out."""
    return torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype)[:, ::2]


def gaps(x: torch.Tensor) -> torch.Tensor:
    """Rows of 8 more bytes than they had."""
    more = 8 // x.itemsize
    return torch.empty(x.shape[0], x.shape[1] + more, dtype=x.dtype)[:, : x.shape[1]]


def wider(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], x.shape[1] + 16, dtype=x.dtype)


def narrower(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-8]


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """The same shape and row stride, with every other element of memory left out."""
    return torch.empty(2 * x.numel(), dtype=x.dtype).as_strided(x.shape, (x.shape[1], 2))


def of_three_dimensions(x: torch.Tensor) -> torch.Tensor:
    return x[..., None]


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0] + 1, x.shape[1], dtype=x.dtype)


def of_type(dtype: torch.dtype):
    return lambda x: torch.empty(x.shape, dtype=dtype)


def rows_of(k: int):
    return lambda x: torch.empty(x.shape[0], k, dtype=x.dtype)


def overlapping(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, x.shape[1] + 16, dtype=x.dtype)[:, : x.shape[1]].expand(x.shape)


QDATA = "must be a 2-d float8_e4m3fn tensor"
ALIGNED = "must be contiguous and start on multiples of 16 bytes; pad them"
SCALES = "must be FP32, one per"
OF_OUTPUT = "the output must be a BF16 or FP32 tensor of 20 x 144"
OUTPUT_ROWS = "rows of the output must be contiguous multiples of 16 bytes that do not overlap"
BIAS = "the bias must be 144 contiguous BF16 or FP32 values"


def of_gemm(operator: str, a: str, b: str, out: str, names: tuple[str, str], rows_a_scale: int) -> list[tuple]:
    cases = []
    for operand, name, per in ((a, names[0], 1), (b, names[1], rows_a_scale)):
        cases += [
            (operator, operand, lambda x: x.view(torch.uint8), f"the qdata of {name} {QDATA}"),
            (operator, operand, of_three_dimensions, f"the qdata of {name} {QDATA}"),
            (operator, operand, spread, f"the rows of {name} {ALIGNED}"),
            (operator, operand, gaps, f"the rows of {name} {ALIGNED}"),
            (operator, operand, shifted, f"the rows of {name} {ALIGNED}"),
            (operator, operand, overlapping, f"the rows of {name} {ALIGNED}"),
            (operator, operand, wider, "the operands contract"),
            (operator, f"{operand}_scales", of_type(torch.float64), f"the scales of {name} {SCALES} {per} x 128"),
            (operator, f"{operand}_scales", longer, f"the scales of {name} {SCALES} {per} x 128"),
            (operator, f"{operand}_scales", wider, f"the scales of {name} {SCALES} {per} x 128"),
            (operator, f"{operand}_scales", of_three_dimensions, f"the scales of {name} {SCALES} {per} x 128"),
            (operator, f"{operand}_scales", torch.flatten, f"the scales of {name} {SCALES} {per} x 128"),
        ]
    return [
        *cases,
        (operator, out, of_type(torch.float16), OF_OUTPUT),
        (operator, out, longer, OF_OUTPUT),
        (operator, out, wider, OF_OUTPUT),
        (operator, out, torch.flatten, OF_OUTPUT),
        (operator, out, of_three_dimensions, OF_OUTPUT),
        (operator, out, spread, OUTPUT_ROWS),
        (operator, out, gaps, OUTPUT_ROWS),
        (operator, out, shifted, OUTPUT_ROWS),
        (operator, out, overlapping, OUTPUT_ROWS),
        (operator, "block", lambda _: 100, "for the kernel's choice"),
        (operator, "cluster", lambda _: 3, "for the kernel's choice"),
    ]


def of_dense(operator: str, argument: str, name: str, kind: str) -> list[tuple]:
    sentence = rf"{name} must be \d+ x \d+ contiguous {kind} that start on a multiple of 16 bytes"
    sizes = [longer, wider, narrower, torch.flatten, of_three_dimensions]
    changes = [of_type(torch.int16), *sizes, spread, interleaved, gaps, shifted]
    return [(operator, argument, change, sentence) for change in changes]


def three_dimensional(change: Callable) -> Callable:
    """``change`` applied to all experts' rows as one matrix."""
    return lambda x: change(x.flatten(0, 1)).unflatten(0, (x.shape[0], -1))


def apart(x: torch.Tensor) -> torch.Tensor:
    """Experts that are not parts of one matrix: half a row of bytes between them."""
    e, n, k = x.shape
    return (
        torch.empty(e * (n * k + k // 2), dtype=torch.uint8).view(x.dtype).as_strided(x.shape, (n * k + k // 2, k, 1))
    )


STARTS = "the experts' first rows must be contiguous int32 values"
W_ALIGNED, W_SCALES = "the rows of W must be contiguous", "the scales of W must be FP32, one per 128 x 128 qdata"


def of_experts(operator: str) -> list[tuple]:
    """The cases of of_gemm for X and the output, and those of experts."""
    x = [case for case in of_gemm(operator, "x", "w", "y", ("X", "W"), BLOCK) if case[1] not in ("w", "w_scales")]
    x = [(*case[:3], case[3].replace("20 x 144", "20 x 128")) for case in x]
    return [
        *x,
        (operator, "y", of_type(torch.float32), "FProp writes BF16"),
        (operator, "w", lambda w: w.view(torch.uint8), "the qdata of W must be a float8_e4m3fn tensor of 3 matrices"),
        (operator, "w", lambda w: w[0], "the qdata of W must be a float8_e4m3fn tensor of 3 matrices"),
        (operator, "w", lambda w: w[:2], "the qdata of W must be a float8_e4m3fn tensor of 3 matrices"),
        (operator, "w", lambda w: w[:, :64], "experts of 64 x 256 are not whole blocks"),
        (operator, "w", lambda w: w[:, :, :144], "experts of 128 x 144 are not whole blocks"),
        (operator, "w", lambda w: w[:, :, :128], "the scales of W must be FP32"),
        (operator, "w", three_dimensional(spread), W_ALIGNED),
        (operator, "w", three_dimensional(gaps), W_ALIGNED),
        (operator, "w", shifted, W_ALIGNED),
        (operator, "w", lambda w: w[:1, :1].expand(w.shape), W_ALIGNED),
        (operator, "w", lambda w: w[:1].expand(w.shape), "experts must lie below each other in one matrix"),
        (operator, "w", apart, "experts must lie below each other in one matrix"),
        (operator, "w_scales", of_type(torch.float64), W_SCALES),
        (operator, "w_scales", lambda s: s[:, :, :1], W_SCALES),
        (operator, "w_scales", lambda s: s[:2], W_SCALES),
        (operator, "w_scales", lambda s: torch.cat([s, s], 1), W_SCALES),
        (operator, "w_scales", lambda s: s[0], W_SCALES),
        (operator, "slices", lambda _: 0, "a dimension of 0 is not supported"),
        (operator, "slices", lambda _: 2, "the output must be a BF16 or FP32 tensor of 40 x 128"),
        (operator, "slices", lambda _: 2**27, "a dimension of 2684354560 is not supported"),
        *of_starts(operator),
    ]


def of_starts(operator: str) -> list[tuple]:
    return [
        (operator, "start", of_type(torch.int64), STARTS),
        (operator, "start", lambda s: s[:, None], STARTS),
        (operator, "start", lambda s: s.repeat_interleave(2)[::2], STARTS),
        (operator, "start", lambda s: s[:1], "a dimension of 0 is not supported"),
    ]


DW_OF_EXPERTS = "the output must be 60 contiguous BF16 rows of 144"

REFUSED = [
    *of_experts("grouped_fprop"),
    *of_experts("grouped_decode"),
    *(
        case
        for case in of_gemm("grouped_wgrad", "a", "b", "dw", (r"dY\^T", r"X\^T"), 1)
        if case[1] != "dw" and (case[1] not in ("a_scales", "b_scales") or case[2] is not torch.flatten)
    ),
    *of_starts("grouped_wgrad"),
    *(
        ("grouped_wgrad", "dw", change, DW_OF_EXPERTS)
        for change in (of_type(torch.float32), shifted, lambda w: w[:2], lambda w: w[0], three_dimensional(gaps))
    ),
    ("grouped_wgrad", "a_scales", lambda s: s.contiguous(), "the scales of a group of tokens must lie side by side"),
    ("grouped_wgrad", "b_scales", shifted, "the scales of a group of tokens must lie side by side"),
    *of_gemm("fprop", "x", "w", "y", ("X", "W"), BLOCK),
    *of_gemm("decode", "x", "w", "y", ("X", "W"), BLOCK),
    *of_gemm("fprop_of_ranks", "x", "w", "y", ("X", "W"), BLOCK),
    *(("fprop_of_ranks", "ranks", lambda _, n=n: n, "slice of K must be a multiple of 128") for n in (3, 4)),
    ("fprop_of_ranks", "ranks", lambda _: 0, "a dimension of 0 is not supported"),
    *of_gemm("wgrad", "a", "b", "dw", (r"dY\^T", r"X\^T"), 1),
    *(
        (operator, "y", of_type(torch.float32), "FProp writes BF16")
        for operator in ("fprop", "decode", "fprop_of_ranks")
    ),
    *((operator, "bias", lambda _: torch.zeros(143), BIAS) for operator in ("fprop", "decode")),
    *((operator, "bias", lambda _: torch.zeros(288)[::2], BIAS) for operator in ("fprop", "decode")),
    *((operator, "bias", lambda _: torch.zeros(144, dtype=torch.float16), BIAS) for operator in ("fprop", "decode")),
    *((operator, "bias", lambda _: torch.zeros(144, 1), BIAS) for operator in ("fprop", "decode")),
    *((operator, "qdata", rows_of(264), f"the rows of X {ALIGNED}") for operator in ("relayout", "transpose")),
    *((operator, "qdata", shifted, f"the rows of X {ALIGNED}") for operator in ("relayout", "transpose")),
    *((operator, "scales", longer, f"the scales of X {SCALES}") for operator in ("relayout", "transpose")),
    ("relayout", "qdata", lambda x: wider(x)[:, :264], "rows of qdata must be multiples of 16 bytes"),
    ("transpose", "qdata", lambda x: x[:, :264], "rows of qdata must be multiples of 16 bytes"),
    ("transpose", "qdata", lambda x: x[:136], "rows of the transpose must be multiples of 16 bytes"),
    *of_dense("relayout", "out", "the transpose", "bytes"),
    *of_dense("relayout", "out_scales", "the scales of the transpose", "FP32 values"),
    *of_dense("transpose", "out", "the transpose", "bytes"),
    *of_dense("transpose", "out_scales", "the scales of the transpose", "FP32 values"),
    *(
        ("delta_rule", argument, change, f"{argument} of a delta rule has another type, shape or place")
        for argument in ("qkv", "out")
        for change in (of_type(torch.float16), shifted)
    ),
    ("delta_rule", "out", lambda x: x[:2], "out of a delta rule has another type, shape or place"),
    *(
        ("delta_rule", argument, of_type(torch.int64), f"{argument} of a delta rule has another type")
        for argument in ("a_log", "dt_bias", "slots", "computed", "cu_seqlens")
    ),
    *(("delta_rule", "a", change, "a of a delta rule must be FP32") for change in (spread, of_type(torch.bfloat16))),
    *(
        ("delta_rule", "states", change, "each head's contiguous")
        for change in (shifted, of_type(torch.bfloat16), lambda x: x.mT, lambda x: x[:, :2])
    ),
    ("delta_rule", "slots", lambda _: None, "states need slots and computed tokens"),
    ("delta_rule", "qkv", rows_of(640), "as many values for each key"),
    ("silu_mul_backward", "dy", rows_of(200), "gradients of 200 columns are not whole groups of 128"),
    ("silu_mul_backward", "dy", lambda x: x[:0], "a dimension of 0 is not supported"),
    *(
        ("silu_mul_backward", argument, change, f"{name} must be BF16, 20 x 256")
        for argument, name in (("gate", "gate"), ("up", "up"))
        for change in (longer, wider, of_type(torch.float16), torch.flatten, of_three_dimensions)
    ),
    *(
        ("silu_mul_backward", argument, change, f"rows of {name} must be contiguous and start on multiples of 16")
        for argument, name in (("dy", "dY"), ("gate", "gate"), ("up", "up"))
        for change in (spread, gaps, shifted)
    ),
    *(
        case
        for of in ("dgate", "dup")
        for case in (
            *of_dense("silu_mul_backward", of, "the qdata of a gradient", "bytes"),
            *of_dense("silu_mul_backward", f"{of}_scales", "the scales of a gradient", "FP32 values"),
            *of_dense("silu_mul_backward", f"{of}_columns", "the transpose", "bytes"),
            *of_dense("silu_mul_backward", f"{of}_column_scales", "the scales of the transpose", "FP32 values"),
        )
    ),
]

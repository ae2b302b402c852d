# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled GEMM: any M, N and K, both kinds of B scales, bias, BF16 or FP32 out, or added to a weight gradient.

Two-level accumulation: a Hopper FP8 matrix instruction adds into its FP32 registers with about 14 bits, so the partial
sum of one 128-wide K block starts from zero in registers of its own and is then promoted by FP32 arithmetic:
``acc = fma(partial, s_a * s_b, acc)``, K blocks ascending, one program per output tile, no split of K. BLOCK_N divides
128, so a tile has one B scale per K block when B is block-scaled. Bias joins the accumulator before the one rounding.

A row's bits must not depend on how many rows travel with it, or decoding one token and training on the whole sequence
would disagree. Every tile has at least 64 rows and 128-wide K blocks, so an output element is the same chain of matrix
instructions in each: the choice by size moves work, not bits (test_gemm_on_gpu.py).

Backends: Triton; native (csrc/gemm.h, Hopper); vLLM's CUTLASS; beside the table cuBLASLt and DeepGEMM, for comparison.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
import triton.language as tl

from jetrl_verl import reference
from jetrl_verl.kernels import native, vllm_kernels
from jetrl_verl.kernels.device.e4m3 import GROUP
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import backend_needs, choose, implements, lookup
from jetrl_verl.kernels.operator import operator
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.reference.gemm import check_add_to, check_gemm_shapes, check_k_slices

for _operation in ("gemm_nt_128x128", "gemm_nt_1x128"):
    implements(_operation, "reference")(reference.gemm_nt)

# (BLOCK_M, BLOCK_N, warps, stages), from the most arithmetic per byte to the most programs for a small problem.
TILES = ((128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 6), (64, 32, 4, 8))
_TILES_PER_GROUP = 8


@jit
def _gemm_nt_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    rank_blocks,
    stride_am,
    stride_bn,
    stride_as_m,
    stride_as_k,
    stride_bs_n,
    stride_bs_k,
    B_BLOCK_SCALED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ADD: tl.constexpr,
    OF_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_GROUP: tl.constexpr,
):
    # Programs walk down groups of TILES_PER_GROUP tile rows, so that neighbours share A and B tiles in L2.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    group = program // (TILES_PER_GROUP * tiles_n)
    group_rows = tl.minimum(tiles_m - group * TILES_PER_GROUP, TILES_PER_GROUP)
    in_group = program % (TILES_PER_GROUP * tiles_n)
    tile_m = group * TILES_PER_GROUP + in_group % group_rows
    tile_n = in_group // group_rows

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    read_row, read_column = row % m, column % n
    lane = tl.arange(0, GROUP)
    a_ptrs = a_ptr + read_row.to(tl.int64)[:, None] * stride_am + lane[None, :]
    b_ptrs = b_ptr + read_column.to(tl.int64)[None, :] * stride_bn + lane[:, None]
    a_scale_ptrs = a_scales_ptr + read_row.to(tl.int64) * stride_as_m
    if B_BLOCK_SCALED:
        b_scale_ptrs = b_scales_ptr + (tile_n * BLOCK_N // GROUP).to(tl.int64) * stride_bs_n
    else:
        b_scale_ptrs = b_scales_ptr + read_column.to(tl.int64) * stride_bs_n

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if OF_RANKS:
        # -0 + x is x, whatever its sign.
        total = tl.full((BLOCK_M, BLOCK_N), -0.0, dtype=tl.float32)
    for block in range(0, tl.cdiv(k, GROUP)):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            left = k - block * GROUP
            a = tl.load(a_ptrs, mask=lane[None, :] < left, other=0.0)
            b = tl.load(b_ptrs, mask=lane[:, None] < left, other=0.0)
        a_scale = tl.load(a_scale_ptrs)
        b_scale = tl.load(b_scale_ptrs)
        partial = tl.dot(a, b, out_dtype=tl.float32)
        scale = (a_scale * b_scale)[:, None] if B_BLOCK_SCALED else a_scale[:, None] * b_scale[None, :]
        acc = tl.fma(partial, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N)), acc)
        a_ptrs += GROUP
        b_ptrs += GROUP
        a_scale_ptrs += stride_as_k
        b_scale_ptrs += stride_bs_k
        if OF_RANKS:
            ends_a_slice = (block + 1) % rank_blocks == 0
            if ends_a_slice:
                if WITH_BIAS:
                    of_rank_0 = block < rank_blocks
                    if of_rank_0:
                        acc += tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
                total += acc.to(tl.bfloat16).to(tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    if OF_RANKS:
        acc = total
    elif WITH_BIAS:
        acc += tl.load(bias_ptr + read_column).to(tl.float32)[None, :]
    out_offsets = row.to(tl.int64)[:, None] * n + column[None, :]
    mask = (row < m)[:, None] & (column < n)[None, :]
    if ADD:
        acc += tl.load(out_ptr + out_offsets, mask=mask)
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _multiprocessors_and_shared_memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 1, 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def choose_tile(m: int, n: int, multiprocessors: int) -> tuple[int, int, int, int]:
    """Largest tile of ``TILES`` that still gives every multiprocessor a program, else the smallest."""
    for tile in TILES:
        if ceil_div(m, tile[0]) * ceil_div(n, tile[1]) >= multiprocessors:
            return tile
    return TILES[-1]


@implements("gemm_nt_128x128", "triton")
@implements("gemm_nt_1x128", "triton")
def triton_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
    ranks: int = 1,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt`. FP8 data may have any row stride.

    Args:
        ranks: above 1, as :func:`jetrl_verl.reference.gemm_nt_of_ranks`.
        tile: ``(BLOCK_M, BLOCK_N, warps, stages)`` instead of the choice by size; for tests and benchmarks.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    if ranks > 1:
        check_k_slices(k, ranks)
    if add_to is not None:
        check_add_to(add_to, m, n, b_block_scaled, out_dtype)
    out = add_to if add_to is not None else torch.empty(m, n, dtype=out_dtype, device=a.qdata.device)
    if m == 0 or n == 0:
        return out
    a_qdata = a.qdata if a.qdata.stride(1) == 1 else a.qdata.contiguous()
    b_qdata = b.qdata if b.qdata.stride(1) == 1 else b.qdata.contiguous()
    multiprocessors, shared_memory = _multiprocessors_and_shared_memory(a.qdata.device)
    block_m, block_n, warps, stages = tile or choose_tile(m, n, multiprocessors)
    # A stage holds one K block of both operands; Ada and consumer Blackwell have under half of Hopper's shared memory.
    stages = min(stages, shared_memory // ((block_m + block_n) * BLOCK))
    _gemm_nt_kernel[(ceil_div(m, block_m) * ceil_div(n, block_n),)](
        a_qdata,
        b_qdata,
        a.scales,
        b.scales,
        bias.contiguous() if bias is not None else a.scales,
        out,
        m,
        n,
        k,
        k // ranks // BLOCK if ranks > 1 else 0,
        a_qdata.stride(0),
        b_qdata.stride(0),
        a.scales.stride(0),
        a.scales.stride(1),
        b.scales.stride(0),
        b.scales.stride(1),
        B_BLOCK_SCALED=b_block_scaled,
        WITH_BIAS=bias is not None,
        EVEN_K=k % BLOCK == 0,
        ADD=add_to is not None,
        OF_RANKS=ranks > 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TILES_PER_GROUP=_TILES_PER_GROUP,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def native_supports_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
) -> bool:
    """Whether :func:`native_gemm_nt` accepts this call: rows of qdata and of ``add_to`` on 16-byte steps, rows of the
    output whole 16 bytes; with 128x128 scales BF16 out, with 1x128 scales no bias."""
    n = b.qdata.shape[0]
    if add_to is not None and not native.aligned(add_to):
        return False
    if min(*a.qdata.shape, n) == 0 or (n * out_dtype.itemsize) % native.ALIGNMENT != 0:
        return False
    fits = out_dtype == torch.bfloat16 if b_block_scaled else bias is None
    bias_fits = bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous())
    return fits and bias_fits and native.aligned(a.qdata) and native.aligned(b.qdata) and native.unavailable() is None


_KERNELS_CHOICE = native.Plan()


def _launch_native(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    plan: native.Plan | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """:func:`native_gemm_nt` of a call that it supports."""
    check_gemm_shapes(a, b, b_block_scaled, bias)
    m, n = a.qdata.shape[0], b.qdata.shape[0]
    if add_to is not None:
        check_add_to(add_to, m, n, b_block_scaled, out_dtype)
        out = add_to
    elif out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.qdata.device)
    operands, plan = (a.qdata, a.scales, b.qdata, b.scales), plan or _KERNELS_CHOICE
    if b_block_scaled:
        few = plan.kernel == "decode" if plan.kernel else m <= native.FEW_ROWS
        if few:
            native.operators().decode(*operands, bias, out, *plan[1:], static_weight)
        else:
            native.operators().fprop(*operands, bias, out, *plan[1:])
    else:
        native.operators().wgrad(*operands, out, add_to is not None, *plan[1:])
    return out


@implements("gemm_nt_128x128", "native", supports=native_supports_gemm_nt, unchecked=_launch_native)
@implements("gemm_nt_1x128", "native", supports=native_supports_gemm_nt, unchecked=_launch_native)
def native_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    plan: native.Plan | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """As :func:`jetrl_verl.reference.gemm_nt`; scales may have any strides.

    Args:
        out: ``[M, N]`` of ``out_dtype`` to write to, rows on 16-byte steps; None allocates it.
        add_to: instead of ``out``, to be added to.
        plan: instead of the choice by shape; for tests and benchmarks.
        static_weight: the decode kernel may begin to copy ``b`` while the previous kernel in the stream still runs
            (programmatic dependent launch), if that one allows it, as the quantizers of this tree do on their first
            line (device/dependents.py). Only the speed depends on it, provided that *the kernel right before this call
            writes neither* ``b`` *nor* ``bias``, *and that it allows nothing to start before all that was in front of
            it has ended*: it was launched without programmatic dependent launch, or waits before it allows. It may
            make ``a``, as a quantizer of this tree does, for which both hold. Hence it is for a rollout, whose
            parameters are constant during a forward and whose linears come behind such a quantizer: a weight sync
            writes them long before. A trainer quantizes its weight right before it multiplies and must never pass it.

    Returns:
        ``out`` or ``add_to``, or the new tensor.

    Raises:
        ValueError: a call that is not supported (:func:`native_supports_gemm_nt`), or an ``add_to`` that is no weight
            gradient.
    """
    check_gemm_shapes(a, b, b_block_scaled, bias)
    if add_to is not None:
        check_add_to(add_to, a.qdata.shape[0], b.qdata.shape[0], b_block_scaled, out_dtype)
    if not native_supports_gemm_nt(a, b, b_block_scaled=b_block_scaled, bias=bias, out_dtype=out_dtype, add_to=add_to):
        added = "" if add_to is None else f" added to rows of stride {add_to.stride(0)}"
        raise ValueError(
            f"native does not support A {tuple(a.qdata.shape)} strides {a.qdata.stride()}, B {tuple(b.qdata.shape)} "
            f"strides {b.qdata.stride()} with {'128x128' if b_block_scaled else '1x128'} scales on B, "
            f"{'a' if bias is not None else 'no'} bias and {out_dtype} out{added}"
            f"{native.why()}; use backend triton."
        )
    if out is not None and add_to is None and out.dtype != out_dtype:
        raise ValueError(f"native: out is {out.dtype} and out_dtype {out_dtype}; they must be the same.")
    call = {"bias": bias, "out_dtype": out_dtype, "out": out, "add_to": add_to, "static_weight": static_weight}
    return _launch_native(a, b, b_block_scaled=b_block_scaled, plan=plan, **call)


# GEMMs of other packages. They keep one FP32 partial sum per 128-wide K block as the contract asks, but none adds a
# bias before its rounding. Each states what it supports; any other call is refused with a sentence, never rerouted.


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.stride() == (1, scales.shape[0]) else scales.t().contiguous().t()


def _whole_blocks(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    k, n = a.qdata.shape[1], b.qdata.shape[0]
    return k % BLOCK == 0 and n % 16 == 0 and a.qdata.is_contiguous() and b.qdata.is_contiguous()


def _vllm_cutlass_fits(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    m, k = a.qdata.shape
    # With a single K block and a single N block its dispatcher would take the scales for per-row ones, hence K > 128.
    return b_block_scaled and out_dtype == torch.bfloat16 and m % 4 == 0 and k > BLOCK and _whole_blocks(a, b)


def _vllm_cutlass(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    scales_a, scales_b = _column_major(a.scales), b.scales.contiguous().t()
    return vllm_kernels.cutlass_scaled_mm(a.qdata, b.qdata.t(), out_dtype=out_dtype, scale_a=scales_a, scale_b=scales_b)


def _no_cublaslt() -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and hasattr(F, "scaled_mm"):
        return None
    return "not a Hopper GPU, or a torch without F.scaled_mm"


def _cublaslt_fits(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    m, k = a.qdata.shape
    # Its heuristic finds no algorithm where M is not a multiple of 4 (the stride of A's scales must be 16 bytes).
    return m % 4 == 0 and k > BLOCK and (not b_block_scaled or b.qdata.shape[0] > BLOCK) and _whole_blocks(a, b)


def _cublaslt(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    if b_block_scaled:
        recipe_b = F.ScalingType.BlockWise128x128
        # It wants block scales padded to a multiple of 4 along K. F.pad by nothing would still copy.
        missing = -b.scales.shape[1] % 4
        scales_b = (F.pad(b.scales, (0, missing)) if missing else b.scales).contiguous().t()
    else:
        recipe_b, scales_b = F.ScalingType.BlockWise1x128, _column_major(b.scales)
    return F.scaled_mm(
        a.qdata,
        b.qdata.t(),
        scale_a=_column_major(a.scales),
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=scales_b,
        scale_recipe_b=recipe_b,
        output_dtype=out_dtype,
    )


def _deep_gemm_fits(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    return b_block_scaled and out_dtype == torch.bfloat16 and _whole_blocks(a, b)


def _deep_gemm(a: QuantizedTensor, b: QuantizedTensor, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype, device=a.qdata.device)
    vllm_kernels.deep_gemm_nt((a.qdata, a.scales), (b.qdata, b.scales), out)
    return out


def _register(
    name: str,
    why_not: Callable[[], str | None],
    fits: Callable[[QuantizedTensor, QuantizedTensor, bool, torch.dtype], bool],
    run: Callable[[QuantizedTensor, QuantizedTensor, bool, torch.dtype], torch.Tensor],
) -> None:
    """Make another package's GEMM a backend: ``why_not`` it cannot run here, what ``fits`` it, the call."""

    def supports(
        a: QuantizedTensor,
        b: QuantizedTensor,
        *,
        b_block_scaled: bool,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        add_to: torch.Tensor | None = None,
    ) -> bool:
        if bias is not None or add_to is not None or a.qdata.shape[0] == 0:
            return False
        return why_not() is None and fits(a, b, b_block_scaled, out_dtype)

    def gemm_nt(
        a: QuantizedTensor,
        b: QuantizedTensor,
        *,
        b_block_scaled: bool,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_gemm_shapes(a, b, b_block_scaled, bias)
        if not supports(a, b, b_block_scaled=b_block_scaled, bias=bias, out_dtype=out_dtype, add_to=add_to):
            installed = "" if why_not() is None else f" (and does not run here: {why_not()})"
            raise ValueError(
                f"{name} does not support A {tuple(a.qdata.shape)}, B {tuple(b.qdata.shape)} with "
                f"{'128x128' if b_block_scaled else '1x128'} scales on B, {'a' if bias is not None else 'no'} bias and "
                f"{out_dtype} out{'' if add_to is None else ' added to a buffer'}{installed}; use backend triton."
            )
        return run(a, b, b_block_scaled, out_dtype)

    backend_needs(name, why_not)
    for operation in ("gemm_nt_128x128", "gemm_nt_1x128"):
        implements(operation, name, supports=supports)(gemm_nt)


_register("vllm_cutlass", vllm_kernels.no_block_fp8_gemm, _vllm_cutlass_fits, _vllm_cutlass)
_register("cublaslt", _no_cublaslt, _cublaslt_fits, _cublaslt)
_register("deep_gemm", vllm_kernels.no_deep_gemm, _deep_gemm_fits, _deep_gemm)


def _fake(a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, *_):
    return a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)


@operator(
    "gemm_nt_128x128(Quantized a, Quantized b, Tensor? bias, ScalarType out_dtype, bool static_weight) -> Tensor",
    fake=_fake,
)
def _gemm_nt_128x128(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    static_weight: bool,
) -> torch.Tensor:
    call = {"b_block_scaled": True, "bias": bias, "out_dtype": out_dtype}
    backend, run = choose("gemm_nt_128x128", a.qdata.device, a, b, **call)
    if backend == "native":
        call["static_weight"] = static_weight
    return run(a, b, **call)


@operator("gemm_nt_1x128(Quantized a, Quantized b, Tensor? bias, ScalarType out_dtype) -> Tensor", fake=_fake)
def _gemm_nt_1x128(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    call = {"b_block_scaled": False, "bias": bias, "out_dtype": out_dtype}
    return lookup("gemm_nt_1x128", a.qdata.device, a, b, **call)(a, b, **call)


@operator("gemm_nt_1x128.add_to(Quantized a, Quantized b, Tensor? bias, Tensor(a!) add_to) -> ()", fake=lambda *_: None)
def _gemm_nt_1x128_add_to(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, add_to: torch.Tensor
) -> None:
    call = {"b_block_scaled": False, "bias": bias, "out_dtype": torch.float32, "add_to": add_to}
    lookup("gemm_nt_1x128", a.qdata.device, a, b, **call)(a, b, **call)


def gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    b_block_scaled: bool,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: torch.Tensor | None = None,
    static_weight: bool = False,
) -> torch.Tensor:
    """See :func:`jetrl_verl.reference.gemm_nt`, and for ``static_weight``, a promise about the kernel right before this
    call, :func:`native_gemm_nt`; backends other than ``native`` have no use for it."""
    if add_to is not None:
        check_gemm_shapes(a, b, b_block_scaled, bias)
        check_add_to(add_to, a.qdata.shape[0], b.qdata.shape[0], b_block_scaled, out_dtype)
        _gemm_nt_1x128_add_to(a, b, bias, add_to)
        return add_to
    if b_block_scaled:
        return _gemm_nt_128x128(a, b, bias, out_dtype, static_weight)
    return _gemm_nt_1x128(a, b, bias, out_dtype)

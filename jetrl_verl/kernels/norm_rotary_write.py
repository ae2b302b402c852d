# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""QK norm, rotary and the write into the KV cache in one launch: a rollout layer before its attention. The bits are
those of :func:`norm_rotary`, then vLLM's copy into BF16 pages or :func:`write_kv` into FP8 pages."""

import torch
import triton.language as tl

from jetrl_verl.kernels.attention import write_pages
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.kv_cache import check_cache, reference_write_kv, unit_of_slot, write_heads, write_heads_from
from jetrl_verl.kernels.norm_rotary import check_norm_rotary, reference_norm_rotary, rotated_heads, store_halves
from jetrl_verl.kernels.operator import operator, require_bf16
from jetrl_verl.kernels.rms_norm import heads_in_place, tile_and_warps
from jetrl_verl.kernels.sizes import HEADS_OF_A_PROGRAM, ceil_div
from jetrl_verl.reference.kv_cache import HEAD_DIM, UNIT_TOKENS

__all__ = ["norm_rotary_write", "norm_rotary_write_fp8"]

_UNIT = tl.constexpr(UNIT_TOKENS)

# --- reference --------------------------------------------------------------------------------------------------------


@implements("norm_rotary_write", "reference")
def reference_norm_rotary_write(
    q, k, v, q_weight, k_weight, eps: float, table, positions, unit_offset: bool, keys, values, slots
) -> torch.Tensor:
    """The operations one after the other; keys and values are stored in cache form."""
    q, k, *_ = reference_norm_rotary(q, k, q_weight, k_weight, eps, table, positions, unit_offset)
    write_pages(k, v, keys, values, slots)
    return q


@implements("norm_rotary_write_fp8", "reference")
def reference_norm_rotary_write_fp8(
    q, k, v, q_weight, k_weight, eps: float, table, positions, unit_offset: bool, cache, slots
) -> torch.Tensor:
    """The operations one after the other."""
    q, k, *_ = reference_norm_rotary(q, k, q_weight, k_weight, eps, table, positions, unit_offset)
    reference_write_kv(k[: len(slots)], v[: len(slots)], cache, slots)
    return q


# --- Triton -----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["table_rows", "slots"])
def _norm_rotary_write_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, q_out_ptr,
    keys_ptr, values_ptr, slots_ptr, eps, table_rows, slots,
    Q_HEADS: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr, PLACE: tl.constexpr, HEAD: tl.constexpr,
    FP8: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    q_programs: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_programs: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    programs: tl.constexpr = q_programs + 2 * kv_programs
    token, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    if program < q_programs:
        position = tl.load(positions_ptr + token)
        head = program * HEADS
        valid = head + tl.arange(0, HEADS) < Q_HEADS
        source = q_ptr + token * Q_TOKEN + head * Q_HEAD
        first, second, _ = rotated_heads(
            source, Q_HEAD, valid, q_weight_ptr, table_ptr, position, table_rows, eps, D, WIDTH, UNIT_OFFSET
        )
        store_halves(first, second, q_out_ptr + (token * Q_HEADS + head) * D, D, valid, D, WIDTH)
    else:
        slot = tl.load(slots_ptr + token, mask=token < slots, other=-1).to(tl.int64)
        head = (program - q_programs) % kv_programs * HEADS
        valid = head + tl.arange(0, HEADS) < KV_HEADS
        stored = valid & (slot >= 0)
        place = slot // BLOCK_SIZE * PAGE + slot % BLOCK_SIZE * PLACE + head * HEAD
        units: tl.constexpr = BLOCK_SIZE // _UNIT
        if program < q_programs + kv_programs:
            position = tl.load(positions_ptr + token)
            source = k_ptr + token * K_TOKEN + head * K_HEAD
            first, second, _ = rotated_heads(
                source, K_HEAD, valid, k_weight_ptr, table_ptr, position, table_rows, eps, D, WIDTH, UNIT_OFFSET
            )
            if FP8:
                unit_ptr, row = unit_of_slot(keys_ptr, slot, head, KV_HEADS, units)
                write_heads(first, second, unit_ptr, row, stored, units, True)
            else:
                store_halves(first, second, keys_ptr + place, HEAD, stored, D, WIDTH)
        else:
            source = v_ptr + token * V_TOKEN + head * V_HEAD
            if FP8:
                unit_ptr, row = unit_of_slot(values_ptr, slot, head, KV_HEADS, units)
                write_heads_from(source, V_HEAD, valid, unit_ptr, row, stored, units, False)
            else:
                column = tl.arange(0, D)[None, :]
                heads = tl.arange(0, HEADS)[:, None]
                v = tl.load(source + heads * V_HEAD + column, mask=valid[:, None])
                tl.store(values_ptr + place + heads * HEAD + column, v, mask=stored[:, None])


def _launch(
    q, k, v, q_weight, k_weight, eps, table, positions, unit_offset: bool, keys, values, slots, layout: dict
) -> torch.Tensor:
    """``layout``: constants of the cache's layout."""
    q, k, v = (heads_in_place(x) for x in (q, k, v))
    tokens, q_heads, width = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    programs = sum(ceil_div(heads, HEADS_OF_A_PROGRAM) for heads in (q_heads, kv_heads, kv_heads))
    if tokens:
        _norm_rotary_write_kernel[(tokens * programs,)](
            q,
            k,
            v,
            q_weight.contiguous(),
            k_weight.contiguous(),
            table.contiguous(),
            positions.contiguous(),
            out,
            keys,
            values,
            slots.contiguous(),
            eps,
            len(table),
            len(slots),
            Q_HEADS=q_heads,
            Q_TOKEN=q.stride(0),
            Q_HEAD=q.stride(1),
            KV_HEADS=kv_heads,
            K_TOKEN=k.stride(0),
            K_HEAD=k.stride(1),
            V_TOKEN=v.stride(0),
            V_HEAD=v.stride(1),
            D=width,
            WIDTH=table.shape[1],
            UNIT_OFFSET=unit_offset,
            **layout,
            HEADS=HEADS_OF_A_PROGRAM,
            num_warps=HEADS_OF_A_PROGRAM * tile_and_warps(width)[1],
        )
    return out


@implements("norm_rotary_write", "triton")
def triton_norm_rotary_write(
    q, k, v, q_weight, k_weight, eps: float, table, positions, unit_offset: bool, keys, values, slots
) -> torch.Tensor:
    """As :func:`norm_rotary_write`; a position that the table lacks gives NaN."""
    page, place, head, _ = keys.stride()
    layout = {"BLOCK_SIZE": keys.shape[1], "PAGE": page, "PLACE": place, "HEAD": head, "FP8": False}
    return _launch(q, k, v, q_weight, k_weight, eps, table, positions, unit_offset, keys, values, slots, layout)


@implements("norm_rotary_write_fp8", "triton")
def triton_norm_rotary_write_fp8(
    q, k, v, q_weight, k_weight, eps: float, table, positions, unit_offset: bool, cache, slots
) -> torch.Tensor:
    """As :func:`norm_rotary_write_fp8`; a position that the table lacks gives NaN."""
    layout = {"BLOCK_SIZE": cache.shape[2] * UNIT_TOKENS, "PAGE": 0, "PLACE": 0, "HEAD": 0, "FP8": True}
    return _launch(q, k, v, q_weight, k_weight, eps, table, positions, unit_offset, cache, cache, slots, layout)


# --- torch operators --------------------------------------------------------------------------------------------------


def _fake(q, *_):
    return q.new_empty(q.shape)


def _check(operation: str, q, k, v, q_weight, k_weight, table, positions, slots) -> None:
    require_bf16(operation, q=q, k=k, v=v, table=table)
    check_norm_rotary(operation, q, k, q_weight, k_weight, table, positions)
    if v.shape != k.shape or slots.ndim != 1 or len(slots) > len(k):
        raise ValueError(
            f"{operation}: keys {tuple(k.shape)}, values {tuple(v.shape)} and slots {tuple(slots.shape)} do not fit; "
            "pass [N, heads, D] twice, and at most N slots"
        )


@operator(
    "norm_rotary_write(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, float eps, Tensor table,"
    " Tensor positions, bool unit_offset, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> Tensor",
    fake=_fake,
)
def norm_rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    unit_offset: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """``rotary(rms_norm(q))``; ``rotary(rms_norm(k))`` and ``v`` go into the pages of a BF16 cache. For inference.

    Args:
        q: ``[N, Hq, D]`` BF16. k, v: ``[N, Hk, D]`` BF16. Each may be a part of a wider tensor.
        q_weight, k_weight: ``[D]``. eps: added to the means of squares.
        table, positions, unit_offset: as of :func:`norm_rotary`.
        keys, values: ``[pages, block size, Hk, D]`` BF16, written in place (on the CPU in :func:`cache_form`), with the
            same strides and contiguous features.
        slots: at most ``[N]``, page times block size plus place, all different. Tokens with a negative slot, or without
            one, are not stored.

    Returns:
        ``[N, Hq, D]`` BF16, contiguous. On a GPU a position that the table lacks gives NaN.

    Raises:
        TypeError: an operand is not BF16, or positions are not integers. ValueError: shapes that do not fit.
        IndexError: on the CPU, a position that the table lacks.
    """
    _check("norm_rotary_write", q, k, v, q_weight, k_weight, table, positions, slots)
    require_bf16("norm_rotary_write", keys=keys, values=values)
    fits = keys.ndim == 4 and keys.shape[2:] == k.shape[1:] and keys.shape == values.shape
    if not fits or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"norm_rotary_write: pages of keys {tuple(keys.shape)} and values {tuple(values.shape)} are not "
            f"[pages, block size, {k.shape[1]}, {k.shape[2]}] of the same strides with contiguous features"
        )
    run = lookup("norm_rotary_write", q.device)
    return run(q, k, v, q_weight, k_weight, eps, table, positions, unit_offset, keys, values, slots)


@operator(
    "norm_rotary_write_fp8(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, float eps, Tensor table,"
    " Tensor positions, bool unit_offset, Tensor(a!) cache, Tensor slots) -> Tensor",
    fake=_fake,
)
def norm_rotary_write_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    unit_offset: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As :func:`norm_rotary_write`, with heads of 128 and an FP8 cache.

    Args:
        cache: uint8 ``[pages, Hk, units, 4128]``, contiguous (:func:`jetrl_verl.reference.cache_shape`).
    """
    _check("norm_rotary_write_fp8", q, k, v, q_weight, k_weight, table, positions, slots)
    check_cache("norm_rotary_write_fp8", cache)
    if k.shape[1:] != (cache.shape[1], HEAD_DIM):
        raise ValueError(
            f"norm_rotary_write_fp8: keys {tuple(k.shape)} are not [N, {cache.shape[1]}, {HEAD_DIM}] as the cache's"
        )
    run = lookup("norm_rotary_write_fp8", q.device)
    return run(q, k, v, q_weight, k_weight, eps, table, positions, unit_offset, cache, slots)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of quantizers and of operations that quantize their result, on any device: the bytes of ``reference``, the
bits of the plain operation, and no write outside their outputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from backends import triton_kernels
from contract_inputs import gaussian, heavy_tailed, inf_and_nan, masked_rows

from jetrl_verl import reference
from jetrl_verl.kernels.rms_norm import launch_rms_norm
from jetrl_verl.reference import QuantizedTensor

EPS = 1e-6
INPUTS = (gaussian, heavy_tailed, inf_and_nan, masked_rows)
_GUARD, _CANARY = 1024, 0xA5


@contextmanager
def canaries(monkeypatch) -> Iterator[None]:
    """Every tensor that ``torch.empty`` makes inside the block starts as 0xA5 and lies between two guards of 1 KiB.

    Checked at the end of the block: the guards. What is not written shows in the comparison with the reference.
    """
    buffers, empty = [], torch.empty

    def guarded(*shape, dtype: torch.dtype, device) -> torch.Tensor:
        shape = shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape
        size = empty(shape, dtype=dtype, device="meta").nbytes
        buffer = torch.full((size + 2 * _GUARD,), _CANARY, dtype=torch.uint8, device=device)
        buffers.append(buffer)
        return buffer[_GUARD : _GUARD + size].view(dtype).view(shape)

    def guarded_like(x: torch.Tensor) -> torch.Tensor:
        return guarded(x.shape, dtype=x.dtype, device=x.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        patch.setattr(torch, "empty_like", guarded_like)
        yield
    assert buffers
    for buffer in buffers:
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            assert (guard == _CANARY).all(), "written outside of an output"


def assert_same_bytes(got: QuantizedTensor, want: QuantizedTensor) -> None:
    """FP8 data compared as bytes (NaN qdata are equal), scales as bits; layouts in memory may differ."""
    assert got.qdata.dtype == want.qdata.dtype
    assert got.qdata.shape == want.qdata.shape
    assert got.scales.shape == want.scales.shape
    assert torch.equal(got.qdata.view(torch.uint8).cpu(), want.qdata.view(torch.uint8).cpu())
    assert torch.equal(
        got.scales.cpu().contiguous().view(torch.int32), want.scales.cpu().contiguous().view(torch.int32)
    )


def check_all_quantizers(backend, x: torch.Tensor, rule: str, device: str) -> None:
    """Every quantizer of ``backend`` on ``x [M, K]`` (CPU) moved to ``device``, against ``reference`` on the CPU."""
    moved = x.to(device)
    row, transposed = reference.quantize_1x128_and_128x1(x, rule)
    weight, weight_t = reference.quantize_128x128_and_transpose(x, rule)
    on_device = [QuantizedTensor(q.qdata.to(device), q.scales.to(device)) for q in (row, weight)]
    assert_same_bytes(backend.quantize_1x128(moved, rule), row)
    assert_same_bytes(backend.quantize_128x1(moved, rule), transposed)
    for got, want in zip(backend.quantize_1x128_and_128x1(moved, rule), (row, transposed), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.quantize_128x128(moved, rule), weight)
    for got, want in zip(backend.quantize_128x128_and_transpose(moved, rule), (weight, weight_t), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(backend.transpose_128x128(on_device[1]), weight_t)
    relaid = reference.relayout_128x1(row, rule)
    assert_same_bytes(backend.relayout_128x1(on_device[0], rule), relaid)
    # The backend's own row result has another layout in memory; the re-layout must read that one too.
    assert_same_bytes(backend.relayout_128x1(backend.quantize_1x128(moved, rule), rule), relaid)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, type and bits; NaN equals itself."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want)))


def bf16(case: Callable, m: int, k: int, device: str, seed: int = 0) -> torch.Tensor:
    """``case(m, k)`` in BF16; another ``seed`` gives another order of its elements."""
    x = case(m, k).to(torch.bfloat16)
    return x.flatten().roll(7919 * seed).view(m, k).to(device)


def check_forms(run: Callable, plain: torch.Tensor, rule: str) -> None:
    """``run(with_rows)`` gives the plain rows, or None without them, and their qdata."""
    qdata = reference.quantize_1x128(plain.cpu(), rule)
    for with_rows in (True, False):
        rows, q = run(with_rows)
        assert_same_bytes(q, qdata)
        if with_rows:
            assert_same_bits(rows, plain)
        else:
            assert rows is None


def check_norm(case: Callable, m: int, k: int, rule: str, device: str) -> None:
    """Alone and after a residual sum, with and without the BF16 rows."""
    x, residual, weight = bf16(case, m, k, device), bf16(gaussian, m, k, device, 1), bf16(gaussian, 1, k, device, 2)[0]
    for added, unit_offset in ((None, False), (residual, False), (residual, True)):
        # The sum comes from the plain kernel: Triton's interpreter truncates where torch, and a GPU, round to BF16.
        summed = x if added is None else triton_kernels.add_rms_norm(x, added, weight, EPS)[1]
        plain, rstd = triton_kernels.rms_norm(summed, weight, EPS, unit_offset)
        qdata = reference.quantize_1x128(plain.cpu(), rule)
        for with_normed in (True, False):
            y, total, own_rstd, q = launch_rms_norm(x, added, weight, EPS, rule, with_normed, unit_offset=unit_offset)
            assert_same_bytes(q, qdata)
            assert_same_bits(own_rstd, rstd)
            assert_same_bits(total, summed)
            assert (y is None) == (not with_normed)
            assert_same_bits(plain if y is None else y, plain)


def check_norm_after_experts(case: Callable, m: int, k: int, rule: str, device: str, slots: int = 2) -> None:
    """With and without qdata, after ``slots`` experts of each of ``m`` tokens; the first expert has no token."""
    experts = slots + 3
    experts_of = torch.arange(m)[:, None] * 5 + torch.arange(slots).flip(0)
    where = reference.segments((1 + experts_of % (experts - 1)).to(torch.int32), experts, 1)
    assert not where.start[1] and (m < 2 or slots < 2 or where.row.flatten().tolist() != list(range(m * slots)))
    y, row = bf16(case, m * slots, k, device), where.row.to(device)
    residual, weight = bf16(gaussian, m, k, device, 1), bf16(gaussian, 1, k, device, 2)[0]
    of_norm, unit_offset = (residual, weight, EPS), bool(m % 2)
    # Of the plain kernels, as above.
    normed, total = triton_kernels.add_rms_norm(triton_kernels.combine(y, row), *of_norm, unit_offset)
    outputs = triton_kernels.combine_add_rms_norm(y, row, *of_norm, unit_offset)
    for got, want in zip(outputs, (normed, total), strict=True):
        assert_same_bits(got, want)

    def run(with_rows: bool) -> tuple:
        call = y, row, *of_norm, rule, with_rows, unit_offset
        rows, own_total, q = triton_kernels.combine_add_rms_norm_quantize_1x128(*call)
        assert_same_bits(own_total, total)
        return rows, q

    check_forms(run, normed, rule)


def check_silu_mul(case: Callable, m: int, k: int, rule: str, device: str) -> None:
    """Operands that are halves of one tensor, every combination of outputs."""
    gate, up = torch.cat([bf16(case, m, k, device), bf16(gaussian, m, k, device, 1)], dim=1).chunk(2, dim=1)
    run = partial(triton_kernels.silu_mul_quantize, gate, up, rule)
    check_forms(run, triton_kernels.silu_mul(gate, up), rule)


def check_silu_mul_backward(case: Callable, m: int, k: int, rule: str, device: str) -> None:
    gate, up = torch.cat([bf16(gaussian, m, k, device), bf16(gaussian, m, k, device, 1)], dim=1).chunk(2, dim=1)
    dy = bf16(case, m, k, device, 2)
    wanted = [
        q
        for gradient in triton_kernels.silu_mul_backward(dy, gate, up)
        for q in reference.quantize_1x128_and_128x1(gradient.cpu(), rule)
    ]
    for got, want in zip(triton_kernels.silu_mul_backward_quantize(dy, gate, up, rule), wanted, strict=True):
        assert_same_bytes(got, want)


def check_sigmoid_mul(case: Callable, m: int, k: int, rule: str, device: str) -> None:
    """Operands that are heads of one tensor, as of a gated query, every combination of outputs."""
    x, gate = (bf16(inputs, m, k, device, seed) for seed, inputs in enumerate((case, gaussian)))
    x, gate = torch.stack([x, gate], dim=1).view(m, 2, k // 128, 128).transpose(1, 2).contiguous().unbind(2)
    run = partial(triton_kernels.sigmoid_mul_quantize, x, gate, rule)
    check_forms(run, triton_kernels.sigmoid_mul(x, gate), rule)


def check_gated_norm(case: Callable, m: int, k: int, rule: str, device: str) -> None:
    """Heads with gates in a wider row; a head has the same bits alone."""
    o = bf16(case, m, k, device).unflatten(1, (-1, 128))
    z = bf16(gaussian, m, k + 64, device, 1)[:, 64:].unflatten(1, (-1, 128))
    of_norm = bf16(gaussian, 1, 128, device, 2)[0], EPS
    plain = triton_kernels.gated_rms_norm(o, z, *of_norm)
    assert_same_bits(triton_kernels.gated_rms_norm(o[:1], z[:1], *of_norm), plain[:1])
    check_forms(partial(triton_kernels.gated_rms_norm_quantize, o, z, *of_norm, rule), plain, rule)


CHECKS = (
    check_norm,
    check_norm_after_experts,
    check_silu_mul,
    check_silu_mul_backward,
    check_sigmoid_mul,
    check_gated_norm,
)


def qdata_in(results) -> list[torch.Tensor]:
    """All tensors of nested results, as bytes."""
    if isinstance(results, torch.Tensor):
        return [results.contiguous().view(torch.uint8)]
    if isinstance(results, QuantizedTensor):
        return qdata_in((results.qdata, results.scales, results.source))
    if isinstance(results, (tuple, list)):
        return [tensor for result in results for tensor in qdata_in(result)]
    return []

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small calls of the operations of linear layers and mixtures, by every backend of a device, against the reference.

qdata is small integers and scales are powers of two, so sums are exact in any order; logits are tied, so each of a
token's four experts has weight 1/4. SiLU and norms are left to the contract check of a job.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from jetrl_verl import reference
from jetrl_verl.kernels import dispatch, native
from jetrl_verl.reference import BLOCK, GemmCall, QuantizedTensor
from jetrl_verl.tools.doctor import LINEARS, MIXTURES

_RULE = "fp32"
_EXPERTS, _PER_TOKEN = 6, 4


class Call(NamedTuple):
    """An operation with arguments on the host; the report lists it as ``name`` under ``subject``."""

    subject: str
    name: str
    operation: str
    arguments: tuple


class Outcome(NamedTuple):
    """Result of a backend's call; ``error`` is empty if it equals the reference in every bit."""

    subject: str
    name: str
    backend: str
    error: str


@cache
def _qdata_type() -> torch.dtype:
    return reference.quantize_1x128(torch.zeros(1, BLOCK, dtype=torch.bfloat16, device="cpu"), _RULE).qdata.dtype


def _operand(generator: torch.Generator, *rows: int, k: int, rows_of_a_scale: int = 1) -> QuantizedTensor:
    """``[*rows, k]``: qdata of -4 to 4, scales of 1/4 to 4, in the layout of quantizers."""
    qdata = torch.randint(-4, 5, (*rows, k), generator=generator, device="cpu").float().to(_qdata_type())
    shape = (*rows[:-1], k // BLOCK, rows[-1] // rows_of_a_scale)
    scales = 2.0 ** torch.randint(-2, 3, shape, generator=generator, device="cpu").float()
    return QuantizedTensor(qdata, scales.transpose(-1, -2))


def _starts(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cpu").cumsum(0).to(torch.int32)


@cache
def calls() -> tuple[Call, ...]:
    """Every call with its operands, 1 MB. Few and many rows reach both native forward kernels; one expert is empty."""
    generator = torch.Generator().manual_seed(20261124)

    def rows(count: int) -> QuantizedTensor:
        return _operand(generator, count, k=2 * BLOCK)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-64, 65, shape, generator=generator, device="cpu").to(torch.bfloat16)

    weight = _operand(generator, 2 * BLOCK, k=2 * BLOCK, rows_of_a_scale=BLOCK)
    experts = _operand(generator, 3, 2 * BLOCK, k=2 * BLOCK, rows_of_a_scale=BLOCK)
    dy, x = (_operand(generator, size, k=3 * BLOCK) for size in (2 * BLOCK, BLOCK))
    many, few = _starts(17, 0, 183), _starts(9, 0, 11)
    assert int(many[-1]) > 3 * native.FEW_ROWS_OF_EXPERT >= int(few[-1])
    # Each token has four experts with equal logits; expert 2 has no token.
    tokens = 37
    logits = torch.full((tokens, _EXPERTS), -3.0, device="cpu")
    order = torch.rand(tokens, _EXPERTS - 1, generator=generator, device="cpu").argsort(dim=1)[:, :_PER_TOKEN]
    logits.scatter_(1, order + (order >= 2), 1.5)
    segments = reference.segments(reference.top_k(logits, _PER_TOKEN), _EXPERTS, BLOCK)
    # Kernels need not write after the last segment.
    quantized, gathered = rows(tokens), (segments.pair[: int(segments.start[-1])], _PER_TOKEN)
    return (
        Call(LINEARS, "FProp", "gemm_nt", (GemmCall.by_weight(rows(200), weight),)),
        Call(LINEARS, "FProp of few rows", "gemm_nt", (GemmCall.by_weight(rows(5), weight),)),
        Call(LINEARS, "WGrad", "wgrad", (GemmCall.by_tokens(dy, x),)),
        Call(LINEARS, "re-layout", "relayout_128x1", (rows(200), _RULE)),
        Call(LINEARS, "transposed weight", "transpose_128x128", (weight,)),
        Call(MIXTURES, "router's choice", "route", (logits, _PER_TOKEN, True)),
        Call(MIXTURES, "segments", "segments", (reference.top_k(logits, _PER_TOKEN), _EXPERTS, BLOCK)),
        Call(MIXTURES, "a rollout's rows", "route_and_permute", (logits, quantized, _PER_TOKEN, True)),
        Call(MIXTURES, "gathered rows", "gather_quantized", (quantized, *gathered)),
        Call(
            MIXTURES,
            "gathered gradients",
            "gather_quantize_1x128_and_128x1",
            (numbers(tokens, 2 * BLOCK), *gathered, _RULE),
        ),
        Call(MIXTURES, "gathered re-layout", "gather_relayout_128x1", (quantized, *gathered, _RULE)),
        Call(MIXTURES, "grouped FProp", "grouped_gemm_nt", (rows(int(many[-1])), experts, many)),
        Call(MIXTURES, "grouped decode", "grouped_gemm_nt", (rows(int(few[-1])), experts, few)),
        Call(MIXTURES, "grouped FProp of ranks", "grouped_gemm_nt_of_ranks", (rows(int(many[-1])), experts, many, 2)),
        Call(MIXTURES, "grouped WGrad", "grouped_wgrad", (dy, x, _starts(BLOCK, 0, 2 * BLOCK))),
        Call(MIXTURES, "combine", "combine", (numbers(len(segments.pair), 2 * BLOCK), segments.row)),
        Call(
            MIXTURES, "combine of ranks", "combine_of_ranks", (numbers(2, len(segments.pair), 2 * BLOCK), segments.row)
        ),
    )


def why_not(backend: str) -> str:
    """Why ``backend`` cannot run in this process; empty if it can."""
    try:
        return dispatch.unavailable(backend) or ""
    except Exception as error:  # an import of native code may raise anything
        return f"{type(error).__name__}: {error}"


def outcomes(device: torch.device) -> list[Outcome]:
    """Every supported call by each available backend of ``device`` except the reference."""
    return [outcome for call in calls() for outcome in _of_call(call, device)]


def _of_call(call: Call, device: torch.device) -> Iterator[Outcome]:
    want = _tensors(dispatch.implementation(call.operation, "reference")(*call.arguments))
    for backend in dispatch.candidates(call.operation, device):
        if backend == "reference" or why_not(backend):
            continue
        try:
            arguments = [_moved(argument, device) for argument in call.arguments]
            if not dispatch.supports(call.operation, backend, *arguments):
                continue
            result = _tensors(dispatch.implementation(call.operation, backend)(*arguments))
            error = _difference([tensor.cpu() for tensor in result], want)
        except Exception as failure:  # compilers and drivers raise anything
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        yield Outcome(call.subject, call.name, backend, error)


def _moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, QuantizedTensor):
        return QuantizedTensor(argument.qdata.to(device), argument.scales.to(device))
    if isinstance(argument, GemmCall):
        return GemmCall(*(_moved(part, device) for part in argument))
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


def _tensors(result: Any) -> list[torch.Tensor]:
    """Tensors of a result, which may be nested tuples; qdata as bytes."""
    if isinstance(result, torch.Tensor):
        return [result.view(torch.uint8) if result.dtype == _qdata_type() else result]
    return [tensor for part in result for tensor in _tensors(part)]


def _difference(result: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (result, want)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} where the reference has {shapes[1]}"
    differ = sum(int((a != b).sum()) for a, b in zip(result, want, strict=True))
    return f"{differ} of {sum(tensor.numel() for tensor in want)} numbers are not the reference's" if differ else ""

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What leaves the trainer at a weight sync: qdata and scales for the quantized layers, BF16 for the rest.

Weights are quantized here, once, from the BF16 value of the gathered master weight, which is the value that the
trainer's own forward quantizes. The rollout copies the qdata and never sees a BF16 weight, so the two sides cannot
round differently (a trainer quantizing its FP32 master against a rollout quantizing the BF16 export has been reported
to cost a factor of 20 in k3_kl, xtuner #2044). The wire carries 1.0002 bytes per quantized weight, 1.0007 with the
contract check's sums; verl's stock wire carries FP32.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from jetrl_verl import formats
from jetrl_verl.formats.format import SCALE_SUFFIX, Format
from jetrl_verl.models.plan import LinearPlan, plan_of
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.sync.stacks import continues, joined


@dataclass
class SyncStatistics:
    """Size and duration of one weight sync as the sender saw it.

    Attributes:
        bytes: sent. stock_bytes: what the same tensors weigh on verl's own wire.
        seconds: from the first tensor asked for to the last one taken, transfer included.
    """

    bytes: int = 0
    stock_bytes: int = 0
    seconds: float = 0.0


def quantize_stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    plans: Mapping[str, LinearPlan],
    scale_rule: str,
    format_name: str = formats.FLOW,
    fixed_scales: dict[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace each planned weight by its qdata followed by its scales; cast every other floating tensor to BF16.

    Args:
        weights: (Hugging Face name, full tensor) of any floating type.
        plans: from :func:`jetrl_verl.models.plan.plan_linears`.
        scale_rule: rule of the qdata.
        format_name: of the qdata, see :func:`jetrl_verl.formats.get`; ``UNQUANTIZED`` where the plans quantize nothing.
        fixed_scales: of weights, by name, where the format keeps scales: those that are in it are used, others are
            made and put in. 0 stands for a row that had nothing but zeros so far; its scale is made once it has others.
            None: all are made.

    Yields:
        What the format sends of a planned weight: ``<name>`` qdata [N, K], of experts [E, N, K], then
        ``<name>_scale_inv`` FP32; else ``<name>`` BF16.
    """
    number_format = None if format_name == formats.UNQUANTIZED else formats.get(format_name)
    stack: list[tuple[str, torch.Tensor]] = []

    def quantized() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor, weight in _quantized(number_format, stack, scale_rule):
            if fixed_scales is not None:
                weight = _with_kept_scales(number_format, name, tensor, weight, scale_rule, fixed_scales)
            yield from number_format.wire(name, weight)
        stack.clear()

    for name, tensor in weights:
        tensor = tensor.detach()
        plan = None if name.endswith(".bias") else plan_of(name, plans)
        planned = plan is not None and plan.quantized
        if planned or tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        if stack and not (planned and continues(stack[-1][1], tensor)):
            yield from quantized()
        if planned:
            stack.append((name, tensor))
        else:
            yield name, tensor
    yield from quantized()


def _quantized(
    number_format: Format, stack: list[tuple[str, torch.Tensor]], rule: str
) -> Iterator[tuple[str, torch.Tensor, QuantizedTensor]]:
    """(name, weight, what it is quantized) of weights below each other, by one call for all of them."""
    if not stack:
        return
    whole = number_format.quantize_weight(joined([tensor for _, tensor in stack]), rule)
    if len(stack) == 1:
        yield *stack[0], whole
        return
    start = 0
    for name, tensor in stack:
        rows = len(tensor)
        scales = number_format.scales_of_rows(whole.scales, start, rows)
        yield name, tensor, QuantizedTensor(whole.qdata[start : start + rows], scales)
        start += rows


def _with_kept_scales(
    number_format: Format,
    name: str,
    weight: torch.Tensor,
    fresh: QuantizedTensor,
    rule: str,
    kept: dict[str, torch.Tensor],
) -> QuantizedTensor:
    """``weight`` under the scales that ``kept`` has of it; rows that it has none of get their own, and keep them."""
    made = torch.where(fresh.qdata.any(dim=-1, keepdim=True), fresh.scales, 0.0)
    scales = kept.get(name, made)
    kept[name] = scales = torch.where(scales == 0, made, scales)
    return number_format.quantize_weight(weight, rule, torch.where(scales == 0, fresh.scales, scales))


def with_completed(
    stream: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor, tuple[str, torch.Tensor | QuantizedTensor] | None]]:
    """Read what :func:`quantize_stream` sends: each (name, tensor) and what is complete with it.

    Complete with its scales is a quantized weight, under the weight's own name; with qdata nothing is yet, None; any
    other tensor is complete by itself.
    """
    weight, qdata = "", None
    for name, tensor in stream:
        if formats.of(tensor) is not None:
            weight, qdata = name, tensor
            yield name, tensor, None
        elif qdata is not None and name == weight + SCALE_SUFFIX:
            yield name, tensor, (weight, QuantizedTensor(qdata, tensor))
            qdata = None
        else:
            yield name, tensor, (name, tensor)


# --- small tensors in few pieces -------------------------------------------------------------------------------------

_PACK = "jetrl.packed/"
_SMALL = 2**18
"""Bytes up to which a tensor is packed: scales, norms, biases and sums of every model; no weight worth mentioning."""
_PACK_BYTES = 2**19
"""Bytes from which a pack leaves. It stays below 1 MiB, verl's smallest bucket: without CUDA IPC what does not fit a
bucket cannot be sent."""
_STACK_BYTES = 192 * 2**20
"""Most bytes of stacked weights, where one alone has not more: less than the embedding of a 7B model, which is one
piece, so that a bucket made for that one holds every piece."""
_ALIGNED = 16


def packed(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Put tensors of a stream together: for each that it sends verl makes a view, a copy and an entry of a message, and
    its receiver the same again.

    Yields:
        Large tensors unchanged, or as they lie below each other, uint8 ``[bytes]`` under a name that says what is in
        it; small ones, under such a name, too, in packs of at most 768 KiB.
    """
    small: list[tuple[str, torch.Tensor]] = []
    large: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in stream:
        if tensor.nbytes > _SMALL:
            if large and not _fits_below(large, tensor):
                yield _stacked(large)
                large = []
            large.append((name, tensor))
            continue
        small.append((name, tensor))
        held += tensor.nbytes
        if held >= _PACK_BYTES:
            yield _pack(small)
            small, held = [], 0
    if large:
        yield _stacked(large)
    if small:
        yield _pack(small)


def _named(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Name of a piece that has these tensors in it."""
    index = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
    return _PACK + json.dumps(index, separators=(",", ":"))


def _fits_below(tensors: list[tuple[str, torch.Tensor]], below: torch.Tensor) -> bool:
    """Whether a tensor goes on with a stack that is not too large for it."""
    total = sum(tensor.nbytes for _, tensor in tensors) + below.nbytes
    return total <= _STACK_BYTES and continues(tensors[-1][1], below)


def _stacked(tensors: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    # At most q, k, v, gate and up of one layer, with o between them where it reads as many features: one storage, one
    # width.
    if len(tensors) == 1:
        return tensors[0]
    return _named(tensors), joined([tensor for _, tensor in tensors]).view(torch.uint8).view(-1)


def _pack(tensors: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    # Wide elements first, so that each lies where its type may lie.
    tensors.sort(key=lambda item: -item[1].element_size())
    used = sum(tensor.nbytes for _, tensor in tensors)
    # The piece behind it begins where this one ends.
    device = _device_of(tensors)
    whole = torch.empty(-(-used // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    rows = [tensor.to(device).contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    torch.cat(rows, out=whole[:used])
    return _named(tensors), whole


def _device_of(tensors: list[tuple[str, torch.Tensor]]) -> torch.device:
    # The manifest is made on the host; one tensor of a GPU decides.
    return next((tensor.device for _, tensor in tensors if tensor.device.type != "cpu"), tensors[0][1].device)


def is_packed(name: str) -> bool:
    """Whether a piece is one of :func:`packed`."""
    return name.startswith(_PACK)


def unpacked(name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of what :func:`packed` put into a piece.

    Args:
        name: of the piece. whole: uint8, from where 8-byte elements may lie.
    """
    index = [(inner, getattr(torch, dtype), shape) for inner, dtype, shape in json.loads(name.removeprefix(_PACK))]
    sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in index]
    parts = whole.split([*sizes, len(whole) - sum(sizes)])
    for (inner, dtype, shape), part in zip(index, parts):
        yield inner, part.view(dtype).view(shape)


def measured(
    weights: Iterable[tuple[str, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream through and add its size and the time until it is drained to ``statistics``."""
    started = time.perf_counter()
    for name, tensor in weights:
        statistics.bytes += tensor.nbytes
        yield name, tensor
    statistics.seconds += time.perf_counter() - started


def counted_stock(
    weights: Iterable[tuple[str, torch.Tensor]], statistics: SyncStatistics
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass verl's own stream through and count its bytes."""
    for name, tensor in weights:
        statistics.stock_bytes += tensor.nbytes
        yield name, tensor

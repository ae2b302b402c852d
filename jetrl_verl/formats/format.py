# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a number format does for linear layers, weight sync, contract check, vLLM's methods, metrics and export.

The trainer quantizes a weight ``[N, K]`` once, sends qdata and scales, and both sides multiply with them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.formats.catalog import Traits
from jetrl_verl.formats.sums import odd_constants, row_sums
from jetrl_verl.reference import BLOCK, QuantizedTensor

SCALE_SUFFIX = "_scale_inv"
"""A weight's scales are ``<weight>_scale_inv``. vLLM remaps names that end in ``scale`` to its KV cache."""


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Constants of a block's sum: ``[BLOCK]`` for its scales, ``[BLOCK * BLOCK / 8]`` for its words."""
    scales, words = odd_constants(BLOCK * (BLOCK // 8 + 1), device).split([BLOCK, BLOCK * BLOCK // 8])
    return scales, words


@cache
def _probe_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias of :meth:`Format.probe`; cached, since a copy from the host waits for the device."""
    generator = torch.Generator().manual_seed(20260121)
    x = torch.randn(17, 3 * BLOCK, generator=generator, device="cpu").mul_(4).to(device, torch.bfloat16)
    w = torch.randn(2 * BLOCK, 3 * BLOCK, generator=generator, device="cpu").to(device, torch.bfloat16)
    bias = torch.randn(2 * BLOCK, generator=generator, device="cpu").to(device, torch.bfloat16)
    return x, w, bias


class QuantizedWeight(QuantizedTensor):
    """A quantized weight and the format that made it, for code that is given weights of any format.

    Attributes:
        format: of ``qdata`` and ``scales``.
    """

    def __init__(self, number_format: "Format", qdata: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(qdata, scales)
        self.format = number_format


class Format(ABC):
    """One number format of a quantized linear layer.

    One that trains (``traits.trains``) or has a mixture's products has the further methods of :class:`BlockFP8`, too.

    Attributes:
        traits: see catalog.py.
        dtype: of the qdata. packing: elements of a row that an entry of the qdata holds.
        rows_per_scale, columns_per_scale: of a weight that share a scale; None: all columns.
        scale_dtype: of the scales.
        accepts_quantized: whether :meth:`linear` accepts a :class:`QuantizedTensor` as input. If so, the format has the
            operations before it: ``rms_norm`` and ``gated_rms_norm`` (differentiable), ``add_rms_norm`` and
            ``combine_add_rms_norm`` with the arguments of ``kernels.<operation>_quantize_1x128``, ``silu_mul`` and
            ``sigmoid_mul`` (differentiable) with those of ``kernels.<operation>_quantize``.
    """

    traits: Traits
    dtype: torch.dtype
    packing: int = 1
    rows_per_scale: int
    columns_per_scale: int | None
    scale_dtype: torch.dtype = torch.float32
    accepts_quantized: bool = False
    rms_norm: Callable[..., QuantizedTensor]
    add_rms_norm: Callable[..., tuple[QuantizedTensor, torch.Tensor]]
    combine_add_rms_norm: Callable[..., tuple[QuantizedTensor, torch.Tensor]]
    gated_rms_norm: Callable[..., QuantizedTensor]
    silu_mul: Callable[..., QuantizedTensor]
    sigmoid_mul: Callable[..., QuantizedTensor]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __reduce__(self) -> str:
        return "FORMAT"  # of its module: one object a process, also of a copied layer

    def check_rule(self, rule: str) -> None:
        """Raise ``ValueError`` unless the format has this scale rule."""
        if rule not in self.traits.scale_rules:
            rules = ", ".join(self.traits.scale_rules)
            raise ValueError(f"unknown scale rule {rule!r} of {self.traits.label}; choose one of {rules}")

    # Quantize and multiply

    @abstractmethod
    def quantize_weight(self, weight: torch.Tensor, rule: str, scales: torch.Tensor | None = None) -> QuantizedWeight:
        """Quantize ``weight [N, K]`` BF16.

        Args:
            rule: scale rule. scales: to use instead of the weight's own, if ``traits.keeps_scales``.

        Returns:
            qdata ``[N, K]``, scales :meth:`scales_shape`.
        """

    @abstractmethod
    def dequantize_weight(self, weight: QuantizedTensor) -> torch.Tensor:
        """``qdata * scales`` in FP32, ``[N, K]``."""

    @abstractmethod
    def linear(
        self,
        x: torch.Tensor | QuantizedTensor,
        weight: QuantizedTensor,
        bias: torch.Tensor | None,
        rule: str,
        static_weight: bool = False,
    ) -> torch.Tensor:
        """``x W^T + bias`` through the operator that trainer and rollout share.

        Args:
            x: ``[..., K]`` BF16, or quantized ``[M, K]``.
            weight: qdata ``[N, K]`` and scales. bias: ``[N]`` or None, added in FP32 before the one rounding.
            static_weight: see ``kernels.fprop``; affects speed only.

        Returns:
            ``[..., N]`` BF16.
        """

    # Shapes

    def qdata_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the qdata of a weight ``[n, k]``."""
        return n, k // self.packing

    def scales_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of a weight ``[n, k]``."""
        return -(-n // self.rows_per_scale), 1 if self.columns_per_scale is None else -(-k // self.columns_per_scale)

    def scales_of_rows(self, scales: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """The scales of ``rows`` rows of a weight from row ``start``, both multiples of ``rows_per_scale``."""
        return scales[start // self.rows_per_scale : (start + rows) // self.rows_per_scale]

    # Wire

    def wire(self, weight: QuantizedTensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(suffix of the weight's name, tensor) in sending order: qdata, then scales."""
        yield "", weight.qdata
        yield SCALE_SUFFIX, weight.scales

    def huggingface_config(self, kept: list[str]) -> dict[str, Any]:
        """``quantization_config`` of an exported folder for stock engines; ``kept``: modules that stay BF16.

        Raises:
            NotImplementedError: not ``traits.exports``.
        """
        raise NotImplementedError(f"{self.traits.label} is not exported")

    # Contract

    def sums(self, weight: QuantizedTensor) -> torch.Tensor:
        """Sums (sums.py) of each 128x128 block, scales included: int64 ``[N/128, K/128]``, N and K multiples of 128."""
        return self.with_scales([self.sums_of_qdata(weight.qdata)], [weight.scales])[0]

    def sums_of_qdata(self, qdata: torch.Tensor) -> torch.Tensor:
        """:meth:`sums` without the scales."""
        return self._sums_of_all_qdata([qdata]).view(qdata.shape[0] // BLOCK, -1)

    def with_scales(self, sums: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`sums` of many weights from :meth:`sums_of_qdata` and their scales, in few launches."""
        per_block = BLOCK // self.rows_per_scale
        # One value a block, or one for all blocks of the same rows where a scale covers a whole row.
        parts = self._sums_of_scales(scales).split([scale.numel() // per_block for scale in scales])
        return torch._foreach_add(
            list(sums), [part.view(len(scale) // per_block, -1) for part, scale in zip(parts, scales, strict=True)]
        )

    def _sums_of_scales(self, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        per_block = BLOCK // self.rows_per_scale
        words = torch.cat([scale.reshape(-1) for scale in scales]).view(torch.int32).to(torch.int64)
        return (words.view(-1, per_block) * _constants(words.device)[0][:per_block]).sum(dim=1)

    def sums_of_all(self, weights: Sequence[QuantizedTensor]) -> torch.Tensor:
        """:meth:`sums` of many weights ``[N, K]``, flattened and concatenated."""
        sums = self._sums_of_all_qdata([weight.qdata for weight in weights])
        scales = [weight.scales for weight in weights]
        if self.columns_per_scale == BLOCK:
            return sums + self._sums_of_scales(scales)
        shapes = [tuple(size // BLOCK for size in weight.qdata.shape) for weight in weights]
        parts = [part.view(shape) for part, shape in zip(sums.split([n * k for n, k in shapes]), shapes, strict=True)]
        return torch.cat([part.view(-1) for part in self.with_scales(parts, scales)])

    def _sums_of_all_qdata(self, qdata: Sequence[torch.Tensor]) -> torch.Tensor:
        return kernels.block_sums(qdata, _constants(qdata[0].device)[1])

    def probe(self, device: torch.device, rule: str) -> int:
        """Sum of two fixed products on ``device`` through :meth:`linear`.

        16 rows without a bias and 17 with one: the dispatch table may choose different backends for the two.
        """
        x, w, bias = _probe_inputs(device)
        weight = self.quantize_weight(w, rule)
        plain, biased = self.linear(x[:16], weight, None, rule), self.linear(x, weight, bias, rule)
        return int(row_sums(torch.cat([plain, biased])).sum().item())

    # NaN and what rounding lost

    @abstractmethod
    def nan_sample(self, qdata: torch.Tensor) -> torch.Tensor:
        """What :meth:`is_nan` reads of a weight's qdata, copied, ``[n]``; samples of weights may be concatenated."""

    @abstractmethod
    def is_nan(self, sample: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Whether weights hold NaN, a boolean scalar, from their :meth:`nan_sample` and scales of any shape."""

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(zero, subnormal) masks: elements of ``qdata`` rounded to zero, and those below the normal range.

        Raises:
            NotImplementedError: the format is not ``traits.measured``.
        """
        raise NotImplementedError(f"{self.traits.label} is not measured")

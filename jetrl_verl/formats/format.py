# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a number format is: the one object that linear layers, weight sync, contract check, vLLM's methods, metrics,
``jetrl diff`` and the export ask instead of telling formats apart themselves.

A format quantizes a weight ``[N, K]`` once, in the trainer; qdata and scales travel; both sides multiply with them.
Formats that train (``traits.trains``) also have the three products of a linear layer, see :class:`TrainedFormat`;
:class:`ExpertsFormat` has those of a mixture's experts, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.formats.catalog import Traits
from jetrl_verl.formats.sums import odd_constants, row_sums
from jetrl_verl.reference import BLOCK, QuantizedTensor, Segments

SCALE_SUFFIX = "_scale_inv"
"""Name of a weight's scales on the wire, in vLLM and in an exported folder: ``<weight>_scale_inv``. vLLM remaps names
that end in ``scale`` to its KV cache."""


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block's sum: ``[BLOCK]`` for its scales, ``[BLOCK * BLOCK / 8]`` for its words."""
    scales, words = odd_constants(BLOCK * (BLOCK // 8 + 1), device).split([BLOCK, BLOCK * BLOCK // 8])
    return scales, words


@cache
def _probe_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias of :meth:`Format.probe`; kept, since a copy from the host waits for the device."""
    generator = torch.Generator().manual_seed(20260121)
    x = torch.randn(17, 3 * BLOCK, generator=generator, device="cpu").mul_(4).to(device, torch.bfloat16)
    w = torch.randn(2 * BLOCK, 3 * BLOCK, generator=generator, device="cpu").to(device, torch.bfloat16)
    bias = torch.randn(2 * BLOCK, generator=generator, device="cpu").to(device, torch.bfloat16)
    return x, w, bias


class Format(ABC):
    """One number format of a quantized linear layer.

    Attributes:
        traits: what a configuration knows of it.
        dtype: type of the qdata, one byte an element.
        rows_per_scale: rows of a weight that share a scale.
        columns_per_scale: columns of a weight that share a scale; None: all of them.
        accepts_quantized: whether :meth:`linear` accepts what a norm or an activation has quantized.
    """

    traits: Traits
    dtype: torch.dtype
    rows_per_scale: int
    columns_per_scale: int | None
    accepts_quantized: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Quantize and multiply

    @abstractmethod
    def quantize_weight(self, weight: torch.Tensor, rule: str, scales: torch.Tensor | None = None) -> QuantizedTensor:
        """Quantize ``weight [N, K]`` BF16.

        Args:
            rule: scale rule. scales: those to use instead of the weight's own, where ``traits.keeps_scales``.

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
        """``x W^T + bias`` through the operator of this format, the one that trainer and rollout share.

        Args:
            x: ``[..., K]`` BF16, or what an operation quantized on its way out, ``[M, K]``.
            weight: qdata ``[N, K]`` and scales. bias: ``[N]`` or None, added in FP32 before the one rounding.
            static_weight: see ``kernels.fprop``; only the speed depends on it.

        Returns:
            ``[..., N]`` BF16.
        """

    # Shapes

    def scales_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of a weight ``[n, k]``."""
        return -(-n // self.rows_per_scale), 1 if self.columns_per_scale is None else -(-k // self.columns_per_scale)

    def scales_of_rows(self, scales: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """The scales of ``rows`` rows of a weight from row ``start``, multiples of ``rows_per_scale``."""
        return scales[start // self.rows_per_scale : (start + rows) // self.rows_per_scale]

    def scales_of_part(self, scales: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """The scales of a part of a weight ``[N, K]``, in whole scales."""
        found = self.scales_of_rows(scales, rows.start, rows.stop - rows.start)
        if (width := self.columns_per_scale) is None:
            return found
        return found[:, columns.start // width : columns.stop // width]

    # Wire

    def wire(self, weight: QuantizedTensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(what follows the weight's name, tensor) of a weight as it is sent: qdata, then scales."""
        yield "", weight.qdata
        yield SCALE_SUFFIX, weight.scales

    def huggingface_config(self, kept: list[str]) -> dict[str, Any]:
        """``quantization_config`` of an exported folder that stock engines read; ``kept``: modules that stay BF16.

        Raises:
            NotImplementedError: not ``traits.exports``.
        """
        raise NotImplementedError(f"{self.traits.label} is not exported")

    # Contract

    def sums(self, weight: QuantizedTensor) -> torch.Tensor:
        """Sums (sums.py) of each 128x128 block of a weight, scales included; N and K are multiples of 128.

        Returns:
            int64 ``[N/128, K/128]``.
        """
        return self.with_scales([self.sums_of_qdata(weight.qdata)], [weight.scales])[0]

    def sums_of_qdata(self, qdata: torch.Tensor) -> torch.Tensor:
        """What :meth:`sums` is without the scales."""
        return self._sums_of_all_qdata([qdata]).view(qdata.shape[0] // BLOCK, -1)

    def with_scales(self, sums: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`sums` of weights from :meth:`sums_of_qdata` and their scales, of all weights at once.

        Scales are few, so a call for each weight would be all launches.
        """
        in_a_block = BLOCK // self.rows_per_scale
        # One value a block, or one for all blocks of the same rows where a scale covers a whole row.
        parts = self._sums_of_scales(scales).split([each.numel() // in_a_block for each in scales])
        return torch._foreach_add(
            list(sums), [part.view(each.shape[0] // in_a_block, -1) for part, each in zip(parts, scales, strict=True)]
        )

    def _sums_of_scales(self, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        in_a_block = BLOCK // self.rows_per_scale
        words = torch.cat([each.reshape(-1) for each in scales]).view(torch.int32).to(torch.int64)
        constants = _constants(words.device)[0][:in_a_block]
        return (words.view(-1, in_a_block) * constants).sum(dim=1)

    def sums_of_all(self, weights: Sequence[QuantizedTensor]) -> torch.Tensor:
        """:meth:`sums` of many weights ``[N, K]``, one behind the other, with few calls."""
        sums, scales = self._sums_of_all_qdata([each.qdata for each in weights]), [each.scales for each in weights]
        if self.columns_per_scale == BLOCK:
            return sums + self._sums_of_scales(scales)
        shapes = [tuple(size // BLOCK for size in each.qdata.shape) for each in weights]
        parts = [part.view(shape) for part, shape in zip(sums.split([n * k for n, k in shapes]), shapes, strict=True)]
        return torch.cat([part.view(-1) for part in self.with_scales(parts, scales)])

    def _sums_of_all_qdata(self, qdata: Sequence[torch.Tensor]) -> torch.Tensor:
        return kernels.block_sums(qdata, _constants(qdata[0].device)[1])

    def probe(self, device: torch.device, rule: str) -> int:
        """Sum of two fixed products on ``device`` through :meth:`linear`.

        [16, 384] x [256, 384] without a bias and [17, 384] x [256, 384] with one: the dispatch table may run the two
        from different backends, so both are probed.
        """
        x, w, bias = _probe_inputs(device)
        weight = self.quantize_weight(w, rule)
        plain, biased = self.linear(x[:16], weight, None, rule), self.linear(x, weight, bias, rule)
        return int(row_sums(torch.cat([plain, biased])).sum().item())

    # What a NaN looks like, and what rounding lost

    def weight_is_nan(self, qdata: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Whether a quantized weight holds NaN, as a boolean scalar on its device: one value per scale is read."""
        return self.is_nan(self.nan_sample(qdata), scales)

    @abstractmethod
    def nan_sample(self, qdata: torch.Tensor) -> torch.Tensor:
        """What :meth:`weight_is_nan` reads of ``qdata``, copied, ``[n]``: samples of weights may be concatenated."""

    @abstractmethod
    def is_nan(self, sample: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """:meth:`weight_is_nan` of what :meth:`nan_sample` kept and the scales of the same weights, any shape."""

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(zero, subnormal) masks of ``qdata``: elements rounded to zero, and those with fewer bits than a normal one.

        Raises:
            NotImplementedError: the format is not ``traits.measured``.
        """
        raise NotImplementedError(f"{self.traits.label} is not measured")


class TrainedFormat(Format):
    """A format in which the trainer's linear layers run forward and backward (``traits.trains``).

    Rowwise data of ``[M, K]`` are quantized along K; colwise data are its transpose ``[K, M]``, quantized along tokens.
    """

    @abstractmethod
    def quantize_activation(self, x: torch.Tensor, rule: str) -> QuantizedTensor:
        """Rowwise data of ``x [M, K]`` BF16."""

    @abstractmethod
    def quantize_gradient(
        self, dy: torch.Tensor, rule: str, *, rowwise: bool, colwise: bool
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """(rowwise ``[M, N]`` for DGrad, colwise ``[N, M]`` for WGrad) of ``dy [M, N]`` BF16; None what is not asked.

        Both together read ``dy`` once.
        """

    @abstractmethod
    def colwise(self, x: QuantizedTensor, rule: str) -> QuantizedTensor:
        """Rowwise ``x [M, K]`` re-laid out for WGrad: ``[K, M]`` in groups along tokens, with fresh maxima."""

    @abstractmethod
    def dequantize_activation(self, x: QuantizedTensor) -> torch.Tensor:
        """``qdata * scales`` in FP32 of rowwise or colwise data."""

    @abstractmethod
    def fprop(
        self, x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, ranks: int = 1
    ) -> torch.Tensor:
        """``Y [M, N]`` BF16 of rowwise X and the weight: :meth:`linear` after its first step.

        Args:
            ranks: over which the rollout splits K. Each slice of it is then a product of its own, rounded to BF16, the
                first with the bias, and the products are added as the ranks add them (kernels/gemm_nt_of_ranks.py).

        Raises:
            ValueError: slices of K that are no multiples of 128.
        """

    @abstractmethod
    def quantize_weight_and_transpose(self, weight: torch.Tensor, rule: str) -> tuple[QuantizedTensor, QuantizedTensor]:
        """:meth:`quantize_weight` of ``[N, K]``, and its transpose ``[K, N]``, which :meth:`dgrad` reads; one pass."""

    @abstractmethod
    def transpose_weight(self, weight: QuantizedTensor) -> QuantizedTensor:
        """The same qdata and scales, ``[K, N]`` of ``[N, K]``."""

    @abstractmethod
    def dgrad(self, dy: QuantizedTensor, transposed: QuantizedTensor) -> torch.Tensor:
        """``dX [M, K]`` BF16 of rowwise dY and the weight's transpose ``[K, N]``."""

    @abstractmethod
    def wgrad(self, dy: QuantizedTensor, x: QuantizedTensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """``dW [N, K]`` BF16 of colwise dY and colwise X; with ``add_to [N, K]`` FP32 added there, in the kernel."""


class ExpertsFormat(TrainedFormat):
    """A format that a mixture's experts have, too (reference/experts.py)."""

    @abstractmethod
    def experts(
        self,
        rows: QuantizedTensor,
        weights: torch.Tensor,
        segments: Segments,
        gate_up: QuantizedTensor,
        down: QuantizedTensor,
        rule: str,
        ranks: int = 1,
        *,
        align: int = 1,
        static_weight: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor]:
        """All experts' forward, on both sides, but for the sum of a token's rows: ``kernels.combine`` or, of several
        ranks, ``kernels.combine_of_ranks``.

        Args:
            rows: rowwise ``[R, H]``, the tokens of the pairs in their rows (``kernels.gather_quantized``); freed before
                the second product where the caller keeps no reference.
            weights: ``[T, k]`` FP32 of the router. segments: rows of the pairs.
            gate_up: ``[E, 2 I, H]`` in 128x128 blocks, gate first. down: ``[E, H, I]``. rule: of what is between them.
            ranks: over which the rollout splits I; see :meth:`fprop`. Each rank rounds its part of a row. All ranks'
                rows, ``2 ranks R H`` bytes, are there at once.
            align: what segments were aligned to.
            static_weight: as in :meth:`linear`, of both weights and the kernel right before this call, which makes
                ``rows``.

        Returns:
            Rows ``[R, H]`` BF16, of several ranks ``[ranks, R, H]``; gate and up ``[R, 2 I]`` BF16; what the down
            projection reads, rowwise ``[R, I]``.

        Raises:
            ValueError: operands that do not fit, or slices of I that are no multiples of 128.
        """

    @abstractmethod
    def experts_gradient(
        self, dout: torch.Tensor, segments: Segments, rule: str, *, colwise: bool
    ) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """(rowwise ``[R, H]``, colwise ``[H, R]``) of the tokens' ``dout [T, H]`` BF16 in segments of 128; the latter
        None unless asked for."""

    @abstractmethod
    def experts_colwise(self, x: QuantizedTensor, segments: Segments, rule: str) -> QuantizedTensor:
        """Colwise ``[H, R]`` of the tokens' rowwise ``x [T, H]`` in segments of 128, as :meth:`colwise`."""

    @abstractmethod
    def experts_dgrad(
        self, dy: QuantizedTensor, weight: QuantizedTensor, start: torch.Tensor, *, align: int = BLOCK
    ) -> torch.Tensor:
        """``[R, K]`` BF16 of rowwise dY ``[R, N]`` in segments aligned to ``align`` and experts' weights
        ``[E, N, K]``."""

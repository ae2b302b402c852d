# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Block FP8, the format of the flow: E4M3, weights in 128x128 blocks, activations and gradients in groups of 128.

With X ``[M, K]``, W ``[N, K]`` and dY ``[M, N]`` every product is one NT GEMM of jetrl_verl/reference (Jet-RL,
arXiv 2601.14243, section 4):

    FProp   Y  = X W^T       X rowwise, groups along K         W in 128x128 blocks
    DGrad   dX = dY W        dY rowwise, groups along N        W^T: the same qdata and scales, transposed
    WGrad   dW = dY^T X      dY colwise, groups along tokens   X colwise, re-laid out from what FProp saved
"""

from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.formats.catalog import FORMATS
from jetrl_verl.formats.e4m3 import lost
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor, Segments, dequantize_1x128, dequantize_128x128
from jetrl_verl.reference.constants import E4M3_NAN_BITS


class BlockFP8(Format):
    """E4M3 in 128x128 blocks (weights) and groups of 128 along the contraction (activations, gradients).

    Rowwise data of ``[M, K]`` are quantized along K, colwise data are the transpose ``[K, M]`` quantized along tokens.
    """

    traits = FORMATS["fp8"]
    dtype = FP8_DTYPE
    rows_per_scale = BLOCK
    columns_per_scale = BLOCK
    accepts_quantized = True
    rms_norm = staticmethod(kernels.rms_norm_quantize_1x128)
    add_rms_norm = staticmethod(kernels.add_rms_norm_quantize_1x128)
    combine_add_rms_norm = staticmethod(kernels.combine_add_rms_norm_quantize_1x128)
    gated_rms_norm = staticmethod(kernels.gated_rms_norm_quantize)
    silu_mul = staticmethod(kernels.silu_mul_quantize)
    sigmoid_mul = staticmethod(kernels.sigmoid_mul_quantize)
    silu_mul_backward = staticmethod(kernels.silu_mul_backward_quantize)
    weighted_silu_mul_backward = staticmethod(kernels.weighted_silu_mul_backward_quantize)
    experts_wgrad = staticmethod(kernels.grouped_wgrad)

    def quantize_weight(self, weight: torch.Tensor, rule: str, scales: torch.Tensor | None = None) -> QuantizedWeight:
        if scales is not None:
            raise ValueError("FP8 computes a weight's scales itself. Leave scales out.")
        if weight.ndim == 2:
            q = kernels.quantize_128x128(weight, rule)
            return QuantizedWeight(self, q.qdata, q.scales)
        # No block holds rows of two experts: N is a multiple of 128.
        experts, n, k = weight.shape
        qdata, scales = kernels.quantize_128x128(weight.reshape(experts * n, k), rule)
        return QuantizedWeight(self, qdata.view(weight.shape), scales.view(experts, n // BLOCK, -1))

    def dequantize_weight(self, weight: QuantizedTensor) -> torch.Tensor:
        flat = QuantizedTensor(weight.qdata.flatten(0, -2), weight.scales.flatten(0, -2))
        return dequantize_128x128(flat).view(weight.qdata.shape)

    def linear(self, x, weight, bias, rule: str, static_weight: bool = False) -> torch.Tensor:
        if isinstance(x, QuantizedTensor):
            return kernels.fprop_quantized(x, weight.qdata, weight.scales, bias, static_weight=static_weight)
        return kernels.fprop(x, weight.qdata, weight.scales, bias, rule, static_weight=static_weight)

    def huggingface_config(self, kept: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }

    def nan_sample(self, qdata: torch.Tensor) -> torch.Tensor:
        # All qdata of a block with an Inf or NaN are NaN, so one element a block is enough.
        return (qdata.view(torch.uint8)[..., ::BLOCK, ::BLOCK] & 0x7F).flatten()

    def is_nan(self, sample: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (sample == E4M3_NAN_BITS).any() | ~scales.isfinite().all()

    def lost(self, qdata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lost(qdata)

    # Training

    dequantize_activation = staticmethod(dequantize_1x128)  # rowwise or colwise
    quantize_weight_and_transpose = staticmethod(kernels.quantize_128x128_and_transpose)  # [N, K] and [K, N]
    transpose_weight = staticmethod(kernels.transpose_128x128)
    dgrad = staticmethod(kernels.gemm_nt)  # of rowwise dY and the weight's transpose
    wgrad = staticmethod(kernels.wgrad)  # of colwise dY and colwise X

    def quantize_activation(self, x: torch.Tensor, rule: str) -> QuantizedTensor:
        """Rowwise data of ``x [M, K]`` BF16."""
        return kernels.quantize_1x128(x, rule)

    def quantize_gradient(
        self, dy: torch.Tensor, rule: str, *, rowwise: bool, colwise: bool
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """(rowwise ``[M, N]`` for DGrad, colwise ``[N, M]`` for WGrad) of ``dy [M, N]`` BF16; None if not asked for."""
        if rowwise and colwise:
            return kernels.quantize_1x128_and_128x1(dy, rule)
        return (
            kernels.quantize_1x128(dy, rule) if rowwise else None,
            kernels.quantize_128x1(dy, rule) if colwise else None,
        )

    def colwise(self, x: QuantizedTensor, rule: str) -> QuantizedTensor:
        """Rowwise ``x [M, K]`` re-laid out for WGrad: ``[K, M]`` in groups along tokens."""
        return kernels.relayout_128x1(x, rule)

    def fprop(
        self, x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, ranks: int = 1
    ) -> torch.Tensor:
        """``Y [M, N]`` BF16 of rowwise X and the weight.

        Args:
            ranks: over which the rollout splits K; products are rounded and added as the ranks do
                (``reference.gemm_nt_of_ranks``).

        Raises:
            ValueError: slices of K that are no multiples of 128.
        """
        if ranks == 1:
            return kernels.gemm_nt(x, weight, bias)
        return kernels.gemm_nt_of_ranks(x, weight, ranks, bias)

    # A mixture of experts

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
        """Forward of all experts, on both sides, without the sum of a token's rows (``kernels.combine``).

        Args:
            rows: rowwise ``[R, H]`` of ``kernels.gather_quantized``; freed before the second product if the caller
                keeps no reference.
            weights: ``[T, k]`` FP32 of the router. segments: rows of the pairs.
            gate_up: ``[E, 2 I, H]`` in 128x128 blocks, gate first. down: ``[E, H, I]``. rule: of the activation.
            ranks: over which the rollout splits I; each rounds its part of a row.
            align: of the segments.
            static_weight: as in :meth:`linear`, for both weights; the kernel before this call writes ``rows``.

        Returns:
            Rows ``[R, H]`` BF16, ``[ranks, R, H]`` of several ranks; gate and up ``[R, 2 I]`` BF16; the down
            projection's input, rowwise ``[R, I]``.

        Raises:
            ValueError: operands that do not fit, or slices of I that are no multiples of 128.
        """
        product = kernels.grouped_gemm_nt(rows, gate_up, segments.start, align, static_weight=static_weight)
        del rows
        inner = kernels.weighted_silu_mul_quantize(product, weights, segments.pair, rule)
        if ranks == 1:
            # The kernel right before writes the activation; the segments are older.
            static = {"static_weight": static_weight, "static_segments": static_weight}
            y = kernels.grouped_gemm_nt(inner, down, segments.start, align, **static)
        else:
            y = kernels.grouped_gemm_nt_of_ranks(inner, down, segments.start, ranks, align)
        return y, product, inner

    def experts_gradient(
        self, dout: torch.Tensor, segments: Segments, rule: str, *, colwise: bool
    ) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """(rowwise ``[R, H]``, colwise ``[H, R]`` or None) of tokens' ``dout [T, H]`` BF16 in segments of 128."""
        k = segments.row.shape[1]
        if colwise:
            return kernels.gather_quantize_1x128_and_128x1(dout, segments.pair, k, rule)
        return kernels.gather_quantized(kernels.quantize_1x128(dout, rule), segments.pair, k), None

    def experts_colwise(self, x: QuantizedTensor, segments: Segments, rule: str) -> QuantizedTensor:
        """:meth:`colwise` ``[H, R]`` of tokens' rowwise ``x [T, H]`` in segments of 128."""
        return kernels.gather_relayout_128x1(x, segments.pair, segments.row.shape[1], rule)

    def experts_dgrad(
        self, dy: QuantizedTensor, weight: QuantizedTensor, start: torch.Tensor, *, align: int = BLOCK
    ) -> torch.Tensor:
        """``[R, K]`` BF16 of rowwise dY ``[R, N]`` in segments of ``align`` and experts' weights ``[E, N, K]``."""
        experts, n, k = weight.qdata.shape
        flat = QuantizedTensor(weight.qdata.view(experts * n, k), weight.scales.view(-1, weight.scales.shape[2]))
        qdata, scales = kernels.transpose_128x128(flat)
        by_expert = QuantizedTensor(
            qdata.view(k, experts, n).transpose(0, 1), scales.view(-1, experts, n // BLOCK).transpose(0, 1)
        )
        return kernels.grouped_gemm_nt(dy, by_expert, start, align)


FORMAT = BlockFP8()

# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""GEMMs that other packages bring: vLLM's CUTLASS kernels, cuBLASLt through torch, DeepGEMM.

The only file of this room that knows vLLM, and it imports it on the first call. Each backend states the shapes it
serves; anything else is refused with a sentence, never rerouted. The three block-scaled ones keep one FP32 partial sum
per 128-wide K block as the contract asks, but none adds a bias before its rounding, so they serve no call with a bias.

* ``vllm_cutlass``: 128x128 scales on B, BF16 out. With a single K block and a single N block its dispatcher would take
  the scales for per-row ones, hence K > 128.
* ``cublaslt``: both kinds of scales on B, BF16 or FP32 out. It wants block scales padded to a multiple of 4 along K.
* ``deep_gemm``: 128x128 scales on B, BF16 out; compiles every shape on first use, for minutes.
* ``vllm_cutlass_int8``: a scale per row of both operands, BF16 out, a BF16 bias or none; N and K multiples of 16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from jetrl_verl.numerics import BLOCK, BlockQuantized
from jetrl_verl.numerics.gemm import check_gemm_shapes
from jetrl_verl.numerics.int8 import check_int8_gemm_shapes


@dataclass(frozen=True)
class ExternalGemm:
    """One backend: its name, whether this environment has it, the shapes it serves, and the call."""

    name: str
    available: Callable[[], bool]
    fits: Callable[[BlockQuantized, BlockQuantized, bool, torch.dtype], bool]
    run: Callable[[BlockQuantized, BlockQuantized, bool, torch.dtype], torch.Tensor]

    def serves(
        self,
        a: BlockQuantized,
        b: BlockQuantized,
        *,
        b_block_scaled: bool,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> bool:
        """Whether :meth:`gemm_nt` takes this call."""
        return bias is None and a.codes.shape[0] > 0 and self.available() and self.fits(a, b, b_block_scaled, out_dtype)

    def gemm_nt(
        self,
        a: BlockQuantized,
        b: BlockQuantized,
        *,
        b_block_scaled: bool,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """As :func:`jetrl_verl.numerics.gemm_nt`; ``ValueError`` for a call that the backend does not serve."""
        check_gemm_shapes(a, b, b_block_scaled, bias)
        if not self.serves(a, b, b_block_scaled=b_block_scaled, bias=bias, out_dtype=out_dtype):
            installed = "" if self.available() else " (and is not installed here)"
            raise ValueError(
                f"{self.name} does not serve A {tuple(a.codes.shape)}, B {tuple(b.codes.shape)} with "
                f"{'128x128' if b_block_scaled else '1x128'} scales on B, {'a' if bias is not None else 'no'} bias and "
                f"{out_dtype} out{installed}; use backend triton."
            )
        return self.run(a, b, b_block_scaled, out_dtype)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.stride() == (1, scales.shape[0]) else scales.t().contiguous().t()


def _aligned(a: BlockQuantized, b: BlockQuantized) -> bool:
    k, n = a.codes.shape[1], b.codes.shape[0]
    return k % BLOCK == 0 and n % 16 == 0 and a.codes.is_contiguous() and b.codes.is_contiguous()


@cache
def _has_vllm_cutlass() -> bool:
    if find_spec("vllm") is None or not torch.cuda.is_available():
        return False
    from vllm import _custom_ops as ops

    major, minor = torch.cuda.get_device_capability()
    return bool(ops.cutlass_scaled_mm_supports_block_fp8(10 * major + minor))


def _vllm_cutlass_fits(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    m, k = a.codes.shape
    return b_block_scaled and out_dtype == torch.bfloat16 and m % 4 == 0 and k > BLOCK and _aligned(a, b)


def _vllm_cutlass(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    from vllm import _custom_ops as ops

    scales_a, scales_b = _column_major(a.scales), b.scales.contiguous().t()
    return ops.cutlass_scaled_mm(a.codes, b.codes.t(), out_dtype=out_dtype, scale_a=scales_a, scale_b=scales_b)


def _has_cublaslt() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and hasattr(F, "scaled_mm")


def _cublaslt_fits(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    m, k = a.codes.shape
    # Its heuristic finds no algorithm where M is not a multiple of 4 (the stride of A's scales must be 16 bytes).
    return m % 4 == 0 and k > BLOCK and (not b_block_scaled or b.codes.shape[0] > BLOCK) and _aligned(a, b)


def _cublaslt(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    if b_block_scaled:
        recipe_b = F.ScalingType.BlockWise128x128
        missing = -b.scales.shape[1] % 4  # F.pad by nothing would still copy
        scales_b = (F.pad(b.scales, (0, missing)) if missing else b.scales).contiguous().t()
    else:
        recipe_b, scales_b = F.ScalingType.BlockWise1x128, _column_major(b.scales)
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=_column_major(a.scales),
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=scales_b,
        scale_recipe_b=recipe_b,
        output_dtype=out_dtype,
    )


@cache
def _has_deep_gemm() -> bool:
    if find_spec("vllm") is None or not torch.cuda.is_available():
        return False
    from vllm.utils.import_utils import has_deep_gemm

    return has_deep_gemm()


def _deep_gemm_fits(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> bool:
    return b_block_scaled and out_dtype == torch.bfloat16 and _aligned(a, b)


def _deep_gemm(a: BlockQuantized, b: BlockQuantized, b_block_scaled: bool, out_dtype: torch.dtype) -> torch.Tensor:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    out = torch.empty((a.codes.shape[0], b.codes.shape[0]), dtype=out_dtype, device=a.codes.device)
    # Without this argument DeepGEMM's wrapper may replace FP32 scales by powers of two.
    fp8_gemm_nt((a.codes, a.scales), (b.codes, b.scales), out, is_deep_gemm_e8m0_used=False)
    return out


class _VllmCutlassInt8:
    """vLLM's INT8 kernel, behind the interface that the dispatch table expects of a conditional backend."""

    def serves(
        self,
        a: BlockQuantized,
        b: BlockQuantized,
        *,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> bool:
        """Whether :meth:`gemm_int8` takes this call."""
        (m, k), n = a.codes.shape, b.codes.shape[0]
        fits = m > 0 and n % 16 == 0 and k % 16 == 0 and a.codes.is_contiguous() and b.codes.is_contiguous()
        same_types = out_dtype == torch.bfloat16 and (bias is None or bias.dtype == out_dtype)
        return fits and same_types and torch.cuda.is_available() and find_spec("vllm") is not None

    def gemm_int8(
        self,
        a: BlockQuantized,
        b: BlockQuantized,
        *,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """As :func:`jetrl_verl.numerics.gemm_int8`; ``ValueError`` for a call that the backend does not serve."""
        check_int8_gemm_shapes(a, b, bias)
        if not self.serves(a, b, bias=bias, out_dtype=out_dtype):
            raise ValueError(
                f"vllm_cutlass_int8 does not serve A {tuple(a.codes.shape)}, B {tuple(b.codes.shape)} with "
                f"{bias.dtype if bias is not None else 'no'} bias and {out_dtype} out here; use backend triton."
            )
        from vllm import _custom_ops as ops

        return ops.cutlass_scaled_mm(a.codes, b.codes.t(), a.scales, b.scales, out_dtype, bias)


vllm_cutlass = ExternalGemm("vllm_cutlass", _has_vllm_cutlass, _vllm_cutlass_fits, _vllm_cutlass)
cublaslt = ExternalGemm("cublaslt", _has_cublaslt, _cublaslt_fits, _cublaslt)
deep_gemm = ExternalGemm("deep_gemm", _has_deep_gemm, _deep_gemm_fits, _deep_gemm)
vllm_cutlass_int8 = _VllmCutlassInt8()

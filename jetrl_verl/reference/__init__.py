# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The precision contract (docs/architecture.md, "The precision flow"): formats, scale rules, quantizers and GEMM.

Plain torch, exact, runs anywhere. Everything else in the tree, Triton, CUDA, the vLLM method, is tested against this
package and never the other way round. One definition:

* E4M3 qdata, ``x ~ qdata * scale``; FP32 scales under one of two rules (``scales.py``);
* activations and output gradients in 1x128 groups along the contraction dimension, weights in 128x128 blocks
  (``quantize.py``);
* one FP32 partial sum per 128-wide K block, promoted as ``acc += (s_a * s_b) * partial`` in ascending K, one rounding
  at the end (``gemm.py``).

The FP8 KV cache has the same groups, one per token and head; ``kv_cache.py`` has them and the layout of its pages. A
mixture of experts is made of the same products; which rows they take and in what order is in ``experts.py``. The INT8
baselines, which quantize the rollout alone, have a contract of their own in ``int8.py``.
"""

from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, FP8_DTYPE, SCALE_RULES, ScaleRule, check_rule
from jetrl_verl.reference.experts import (
    Segments,
    UncombinedRows,
    combine,
    combine_of_ranks,
    gather_quantized,
    gather_rows,
    grouped_gemm_nt,
    grouped_gemm_nt_of_ranks,
    grouped_wgrad,
    rows_of_segments,
    segments,
    top_k,
)
from jetrl_verl.reference.gemm import gemm_nt, gemm_nt_float64, gemm_nt_of_ranks, k_slices, sum_of_ranks
from jetrl_verl.reference.int8 import dequantize_int8, gemm_int8, quantize_int8
from jetrl_verl.reference.kv_cache import (
    UNIT_TOKENS,
    cache_shape,
    dequantize_heads,
    quantize_heads,
    read_cache,
    write_cache,
)
from jetrl_verl.reference.quantize import (
    dequantize_1x128,
    dequantize_128x128,
    quantize_1x128,
    quantize_1x128_and_128x1,
    quantize_128x1,
    quantize_128x128,
    quantize_128x128_and_transpose,
    relayout_128x1,
    transpose_128x128,
)
from jetrl_verl.reference.scales import amax_bits, scale_from_amax_bits
from jetrl_verl.reference.tensor import QuantizedTensor

__all__ = [
    "BLOCK",
    "E4M3_MAX",
    "FP8_DTYPE",
    "SCALE_RULES",
    "QuantizedTensor",
    "UNIT_TOKENS",
    "ScaleRule",
    "Segments",
    "UncombinedRows",
    "amax_bits",
    "cache_shape",
    "check_rule",
    "combine",
    "combine_of_ranks",
    "dequantize_1x128",
    "dequantize_128x128",
    "dequantize_heads",
    "dequantize_int8",
    "gather_quantized",
    "gather_rows",
    "gemm_int8",
    "gemm_nt",
    "gemm_nt_float64",
    "grouped_gemm_nt",
    "grouped_gemm_nt_of_ranks",
    "grouped_wgrad",
    "gemm_nt_of_ranks",
    "k_slices",
    "quantize_1x128",
    "quantize_1x128_and_128x1",
    "quantize_heads",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_128x128_and_transpose",
    "quantize_int8",
    "read_cache",
    "relayout_128x1",
    "rows_of_segments",
    "scale_from_amax_bits",
    "segments",
    "top_k",
    "sum_of_ranks",
    "transpose_128x128",
    "write_cache",
]

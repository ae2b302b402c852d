# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The precision contract in plain torch: formats, scale rules, quantizers, GEMMs. All backends are tested against it.

* E4M3 qdata, ``x ~ qdata * scale``, with FP32 scales under one of two rules (``scales.py``).
* Activations and output gradients in 1x128 groups along the contraction dimension, weights in 128x128 blocks
  (``quantize.py``).
* One FP32 partial sum per 128-wide K block, added as ``acc += (s_a * s_b) * partial`` in ascending K, one rounding at
  the end (``gemm.py``).
* ``experts.py``: which rows a mixture of experts multiplies and in what order it adds them. ``kv_cache.py``: the FP8
  KV cache and its pages. ``int8.py``: the INT8 rollout baselines. ``delta_net.py``: a gated delta net's operations.
  ``norms.py``: RMSNorm.
* ``reproducible.py``: CPU arithmetic without dependence on the batch.
"""

from jetrl_verl.reference.constants import BLOCK, E4M3_MAX, FP8_DTYPE, SCALE_RULES, ScaleRule, check_rule
from jetrl_verl.reference.experts import (
    Segments,
    UncombinedRows,
    add_shared_expert,
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
from jetrl_verl.reference.gemm import (
    GemmCall,
    gemm_nt,
    gemm_nt_float64,
    gemm_nt_of_ranks,
    k_slices,
    multiply,
    sum_of_ranks,
    wgrad,
    wgrad_float64,
)
from jetrl_verl.reference.int8 import dequantize_int8, gemm_int8, quantize_int8
from jetrl_verl.reference.kv_cache import (
    UNIT_TOKENS,
    cache_shape,
    dequantize_heads,
    quantize_heads,
    read_cache,
    write_cache,
)
from jetrl_verl.reference.norms import rms_norm, rms_norm_backward
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

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
"""The precision contract (docs/architecture.md, "The precision flow"): formats, scale rules, quantisers and GEMM.

Plain torch, exact, runs anywhere. Everything else in the tree, Triton, CUDA, the vLLM method, is tested against this
package and never the other way round. One definition:

* E4M3 codes, ``x ~ code * scale``; FP32 scales under one of two rules (``scales.py``);
* activations and output gradients in 1x128 groups along the contraction dimension, weights in 128x128 blocks
  (``quantize.py``);
* one FP32 partial sum per 128-wide K block, promoted as ``acc += (s_a * s_b) * partial`` in ascending K, one rounding
  at the end (``gemm.py``).

The INT8 baselines, which quantise the rollout alone, have a contract of their own in ``int8.py``.
"""

from jetrl_verl.numerics.formats import BLOCK, E4M3_MAX, FP8_DTYPE, SCALE_RULES, ScaleRule, check_rule
from jetrl_verl.numerics.gemm import gemm_nt, gemm_nt_float64
from jetrl_verl.numerics.int8 import dequantize_int8, gemm_int8, quantize_int8
from jetrl_verl.numerics.quantize import (
    BlockQuantized,
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
from jetrl_verl.numerics.scales import amax_bits, scale_from_amax_bits

__all__ = [
    "BLOCK",
    "E4M3_MAX",
    "FP8_DTYPE",
    "SCALE_RULES",
    "BlockQuantized",
    "ScaleRule",
    "amax_bits",
    "check_rule",
    "dequantize_1x128",
    "dequantize_128x128",
    "dequantize_int8",
    "gemm_int8",
    "gemm_nt",
    "gemm_nt_float64",
    "quantize_1x128",
    "quantize_1x128_and_128x1",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_128x128_and_transpose",
    "quantize_int8",
    "relayout_128x1",
    "scale_from_amax_bits",
    "transpose_128x128",
]

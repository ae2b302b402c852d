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
"""The contract on NVIDIA GPUs in Triton, one kernel a file; equal to ``numerics`` in every byte (quantisers)."""

from jetrl_verl.kernels.triton_kernels.gemm_int8 import gemm_int8
from jetrl_verl.kernels.triton_kernels.gemm_nt import TILES, gemm_nt
from jetrl_verl.kernels.triton_kernels.quantize_1x128 import quantize_1x128
from jetrl_verl.kernels.triton_kernels.quantize_1x128_and_128x1 import quantize_1x128_and_128x1, quantize_128x1
from jetrl_verl.kernels.triton_kernels.quantize_128x128 import (
    quantize_128x128,
    quantize_128x128_and_transpose,
    transpose_128x128,
)
from jetrl_verl.kernels.triton_kernels.quantize_int8 import quantize_int8
from jetrl_verl.kernels.triton_kernels.relayout_128x1 import relayout_128x1

__all__ = [
    "TILES",
    "gemm_int8",
    "gemm_nt",
    "quantize_1x128",
    "quantize_1x128_and_128x1",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_128x128_and_transpose",
    "quantize_int8",
    "relayout_128x1",
    "transpose_128x128",
]

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
"""The contract's functions, fast: names and results of jetrl_verl.numerics, served by dispatch.py's table."""

from jetrl_verl.kernels.dispatch import (
    BACKENDS,
    describe_backends,
    gemm_int8,
    gemm_nt,
    override_backend,
    platform_of,
    quantize_1x128,
    quantize_1x128_and_128x1,
    quantize_128x1,
    quantize_128x128,
    quantize_128x128_and_transpose,
    quantize_int8,
    relayout_128x1,
    transpose_128x128,
)
from jetrl_verl.kernels.int8_ops import fprop_int8
from jetrl_verl.kernels.torch_ops import fprop, fprop_codes

__all__ = [
    "BACKENDS",
    "describe_backends",
    "fprop",
    "fprop_codes",
    "fprop_int8",
    "gemm_int8",
    "gemm_nt",
    "override_backend",
    "platform_of",
    "quantize_1x128",
    "quantize_1x128_and_128x1",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_128x128_and_transpose",
    "quantize_int8",
    "relayout_128x1",
    "transpose_128x128",
]

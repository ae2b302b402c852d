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
"""The shared operations on a GPU, one kernel each, the same on both sides.

Batch invariance here is by shape: a program works on whole rows of one tensor, its tile and its number of warps follow
from the width of a row alone, and nothing is chosen by the number of rows. Tiles are addressed so that neither the
alignment of a row nor the number of rows specialises a kernel that sums.
"""

from jetrl_verl.ops.triton_kernels.log_probs import log_probs, log_probs_backward
from jetrl_verl.ops.triton_kernels.logits import logits
from jetrl_verl.ops.triton_kernels.rms_norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    rms_norm_quantize_1x128,
)
from jetrl_verl.ops.triton_kernels.rotary import rotary
from jetrl_verl.ops.triton_kernels.silu_mul import silu_mul, silu_mul_backward

__all__ = [
    "add_rms_norm",
    "log_probs",
    "log_probs_backward",
    "logits",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_quantize_1x128",
    "rotary",
    "silu_mul",
    "silu_mul_backward",
]

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
"""The operations between the linears, one implementation each, called by the trainer's model and by vLLM's.

Each is invariant to the batch: a row's result depends on its operands alone. What they compute is the contract's last
point (docs/architecture.md, "Zero mismatch"); train/shared_operations.py and rollout/shared_operations.py put them in
place.
"""

from jetrl_verl.ops._codes import Quantised
from jetrl_verl.ops.attention import attention, cache_form, check_head_dim, paged_attention
from jetrl_verl.ops.coverage import check_model
from jetrl_verl.ops.logits import log_probs, logits
from jetrl_verl.ops.rms_norm import add_rms_norm, add_rms_norm_quantize_1x128, rms_norm, rms_norm_quantize_1x128
from jetrl_verl.ops.rotary import rotary, rotary_table
from jetrl_verl.ops.silu_mul import silu_mul, silu_mul_backward_quantize, silu_mul_quantize, silu_mul_quantize_1x128

__all__ = [
    "Quantised",
    "add_rms_norm",
    "add_rms_norm_quantize_1x128",
    "attention",
    "cache_form",
    "check_head_dim",
    "check_model",
    "log_probs",
    "logits",
    "paged_attention",
    "rms_norm",
    "rms_norm_quantize_1x128",
    "rotary",
    "rotary_table",
    "silu_mul",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "silu_mul_quantize_1x128",
]

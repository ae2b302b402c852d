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
"""vLLM's side of the INT8 baselines: the quantisation method ``jetrl_int8``.

FlashRL's rollout, per-channel weights and per-token activations, in the frame of ``jetrl_fp8``: the trainer quantises
each weight once and sends codes and scales, vLLM copies them into live parameters in place at every sync, nothing is
transformed afterwards. So scales are never stale and no profiling run is needed; FlashRL, which quantises in vLLM,
profiles scales once and keeps them while the weights move (``jetrl.int8_scales=first``).

The scales of output channels are a column ``[N, 1]`` under the name that block scales have, so that the weight sync,
the contract check and vLLM's loaders treat both formats alike. A row-parallel layer (o_proj, down_proj) quantises its
shard of an activation with the shard's own maximum: with more than one rank its scales differ from those of one rank.
"""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.parameter import BasevLLMParameter, ChannelQuantScaleParameter

from jetrl_verl import kernels
from jetrl_verl.config.vllm_arguments import INT8_METHOD
from jetrl_verl.rollout.method import JetFP8Config, JetLinearMethod


@register_quantization_config(INT8_METHOD)
class JetInt8Config(JetFP8Config):
    """Configuration of the method; fields and planned layers as ``JetFP8Config``. INT8 knows one scale rule."""

    rollout = "int8"

    def get_name(self) -> str:
        return INT8_METHOD

    def linear_method(self) -> JetLinearMethod:
        return JetInt8LinearMethod(self)


@register_weight_loader_v2_supported_method
class JetInt8LinearMethod(JetLinearMethod):
    """INT8 linear: one scale per output channel, ``[N, 1]``."""

    codes = torch.int8

    def scales(
        self, layer: torch.nn.Module, rows: int, columns: int, weight_loader: Callable[..., None]
    ) -> BasevLLMParameter:
        return ChannelQuantScaleParameter(
            data=torch.ones(rows, 1, dtype=torch.float32), output_dim=0, weight_loader=weight_loader
        )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] BF16 -> [..., N] BF16; bias is added in FP32 before the rounding."""
        return kernels.fprop_int8(x, layer.weight, layer.weight_scale_inv, bias)

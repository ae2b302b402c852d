# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: three of four layers have a gated delta net, the fourth a gated attention; a vision tower that text does not
use. Published as ``Qwen3_5ForConditionalGeneration``; verl and vLLM run no other class of it.
"""

from typing import Any

from jetrl_verl.models.families.base import DeltaNet, UnsupportedLayer, read
from jetrl_verl.models.families.vision import VisionFamily


class Qwen35(VisionFamily):
    def check(self, config: Any) -> None:
        super().check(config)
        for name, neutral in (
            ("attn_output_gate", (True,)),
            ("output_gate_type", ("silu", "swish")),
            ("layer_scale", (False,)),
            ("attention_bias", (False,)),
            ("norm_topk_prob", (True,)),
        ):
            if (value := read(config, name, neutral[0])) not in neutral:
                raise UnsupportedLayer(
                    f"it has {name}={str(value).lower()}, which vLLM's and Hugging Face's classes read differently",
                    "fields_of_vllm",
                )
        if self.experts is not None:
            self.experts.check(config)
            if read(config, self.experts.shared_width, 0) < 1:
                raise UnsupportedLayer(
                    "Hugging Face's class has a shared expert, and vLLM's then none", "shared_expert"
                )
        keys, values = self.delta_net.heads(config)
        if values % keys:
            raise UnsupportedLayer(f"{values} value heads are not divided over {keys} key heads", "delta_net_heads")


FAMILY = Qwen35(
    "qwen3_5",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gated=True,
    unit_offset=True,
    partial_rotary=True,
    delta_net=DeltaNet(),
)

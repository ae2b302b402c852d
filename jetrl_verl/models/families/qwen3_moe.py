# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixture of experts: Qwen3's attention, and in every layer a router and experts in the place of the MLP.

The class also knows models with a dense MLP in some layers; none is published, and none is supported.
"""

from typing import Any

from jetrl_verl.models.families.base import Experts, Family, UnsupportedLayer, read


class Qwen3MoE(Family):
    def check(self, config: Any) -> None:
        if read(config, "mlp_only_layers", []) or read(config, "decoder_sparse_step", 1) != 1:
            raise UnsupportedLayer(
                "a mixture of experts with a dense MLP in some layers (mlp_only_layers, decoder_sparse_step) is not "
                "supported by the FP8 flow; use precision=bf16"
            )
        if read(config, "shared_expert_intermediate_size", 0):
            raise UnsupportedLayer(
                "a mixture with a shared expert (shared_expert_intermediate_size), which vLLM's class has and Hugging "
                "Face's has not, is not supported by the FP8 flow; use precision=bf16"
            )
        experts, per_token = self.experts.number(config), read(config, self.experts.per_token, 0)
        if not 1 <= per_token <= experts:
            raise UnsupportedLayer(f"{per_token} of {experts} experts a token make no mixture; fix config.json")


FAMILY = Qwen3MoE("qwen3_moe", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", experts=Experts())

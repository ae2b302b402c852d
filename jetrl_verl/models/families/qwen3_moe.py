# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixture of experts: Qwen3's attention, and a router with experts instead of the MLP in every layer."""

from typing import Any

from jetrl_verl.models.families.base import Experts, Family, UnsupportedLayer, read


class Qwen3MoE(Family):
    def check(self, config: Any) -> None:
        if read(config, "mlp_only_layers", []) or read(config, "decoder_sparse_step", 1) != 1:
            raise UnsupportedLayer(
                "some of its layers have a dense MLP (mlp_only_layers, decoder_sparse_step)",
                "dense_layers_of_a_mixture",
            )
        if read(config, "shared_expert_intermediate_size", 0):
            raise UnsupportedLayer(
                "vLLM's class has a shared expert (shared_expert_intermediate_size), and Hugging Face's has none",
                "shared_expert",
            )
        self.experts.check(config)


FAMILY = Qwen3MoE("qwen3_moe", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", experts=Experts())

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixture of experts: Qwen3's attention, and in every layer a router and experts in the place of the MLP.

The class also knows models with a dense MLP in some layers; none is published, and none is supported.
"""

from typing import Any

from jetrl_verl.models.base import Experts, Family, UnsupportedLayer, read


class Qwen3MoE(Family):
    def check(self, config: Any) -> None:
        if read(config, "mlp_only_layers", []) or read(config, "decoder_sparse_step", 1) != 1:
            raise UnsupportedLayer(
                "a mixture of experts with a dense MLP in some layers (mlp_only_layers, decoder_sparse_step) is not "
                "supported by the FP8 flow; use precision=bf16"
            )


FAMILY = Qwen3MoE("qwen3_moe", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", experts=Experts())

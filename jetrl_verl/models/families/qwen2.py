# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: biases on q, k and v, whatever the configuration says."""

from typing import Any

from jetrl_verl.models.families.base import Family, UnsupportedLayer, read


class Qwen2(Family):
    def check(self, config: Any) -> None:
        head_dim = read(config, "hidden_size") // read(config, "num_attention_heads")
        if self.head_dim(config) != head_dim:
            raise UnsupportedLayer(
                f"vLLM's Qwen2 has heads of hidden_size / num_attention_heads = {head_dim} and ignores head_dim = "
                f"{self.head_dim(config)} of this model's configuration",
                "qwen2_head_dim",
            )


FAMILY = Qwen2("qwen2")

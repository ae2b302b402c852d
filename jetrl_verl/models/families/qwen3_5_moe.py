# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5's mixture of experts: its layers with a router, experts and a shared expert instead of the MLP, whose output
is scaled by the sigmoid of a linear layer. Published as ``Qwen3_5MoeForConditionalGeneration``.
"""

from dataclasses import replace

from jetrl_verl.models.families import qwen3_5
from jetrl_verl.models.families.base import Experts

FAMILY = replace(
    qwen3_5.FAMILY,
    model_type="qwen3_5_moe",
    mlp="mlp.shared_expert",
    gate="mlp.shared_expert.gate_proj",
    up="mlp.shared_expert.up_proj",
    down="mlp.shared_expert.down_proj",
    gate_up="mlp.shared_expert.gate_up_proj",
    activation="mlp.shared_expert.act_fn",
    experts=Experts(renormalize="", shared_gate="mlp.shared_expert_gate"),
)

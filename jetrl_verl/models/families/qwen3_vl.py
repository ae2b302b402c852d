# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense: Qwen3 under a vision tower, some of whose layers' features are added after the first layers."""

from jetrl_verl.models.families.vision import VisionFamily

FAMILY = VisionFamily("qwen3_vl", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")

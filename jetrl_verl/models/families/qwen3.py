# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense: norms on the heads of queries and keys."""

from jetrl_verl.models.families.base import Family

FAMILY = Family("qwen3", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")

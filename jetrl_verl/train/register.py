# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Registers ``attn_implementation=jetrl_varlen`` with transformers, under every precision.

plugin.py calls it when verl's FSDP engine is imported; the implementation is imported by the first model that uses it.
"""

from typing import Any

from jetrl_verl.patches.attention_name import JETRL_ATTENTION


def register() -> None:
    """Register the attention function and its mask function; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(JETRL_ATTENTION, _attend)
    # Without it transformers passes no mask, also not that of padded batches.
    AttentionMaskInterface.register(JETRL_ATTENTION, _mask)


def _attend(*call: Any, **options: Any) -> Any:
    from jetrl_verl.train.varlen_attention import attend

    return attend(*call, **options)


def _mask(**options: Any) -> Any:
    from jetrl_verl.train.varlen_attention import mask

    return mask(**options)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes ``attn_implementation=jetrl_varlen`` known to transformers, in every process that may build an FSDP engine.

The plugin calls :func:`register` when verl's FSDP engine is imported (plugin.py), under every precision. A name in two
tables is all that it leaves there: what the name stands for is imported by the first model that asks for it.
"""

from typing import Any

from jetrl_verl.patches.attention_name import JETRL_ATTENTION


def register() -> None:
    """Register the attention function and its mask function; doing it twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(JETRL_ATTENTION, _attend)
    # Without this one transformers would hand the attention no mask, and padded batches would lose theirs.
    AttentionMaskInterface.register(JETRL_ATTENTION, _mask)


def _attend(*call: Any, **options: Any) -> Any:
    from jetrl_verl.train.varlen_attention import attend

    return attend(*call, **options)


def _mask(**options: Any) -> Any:
    from jetrl_verl.train.varlen_attention import mask

    return mask(**options)

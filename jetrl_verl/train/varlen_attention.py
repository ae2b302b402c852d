# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of stock Hugging Face models over packed or padded batches: ``attn_implementation=jetrl_varlen``.

transformers calls :func:`attend` in each layer and :func:`mask` once per pass (register.py). No mask is built:
sequences of a packed batch begin where positions are zero. That is computed in the first layer and cached on the tensor
that every layer gets. Under Ulysses ranks exchange tokens for heads around it (sequence_parallel.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.varlen_attention import varlen_attention, without_kernel
from jetrl_verl.train import sequence_parallel
from jetrl_verl.train.packing import Packing

_REMEMBERED = "_jetrl_packing"


def mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> torch.Tensor | None:
    """The ``attention_mask`` of every layer: the mask ``[B, T]`` of real tokens, or None for packed batches.

    Arguments are those of transformers' mask interface.

    Raises:
        UnsupportedConfiguration: a mask that is not causal within each sequence.
    """
    # The mask function of a packed batch, causal within sequences, comes with allow_is_causal_skip=False.
    causal = mask_function is causal_mask_function or not allow_is_causal_skip
    if use_vmap or not causal or getattr(config, "attention_chunk_size", None) is not None:
        refuse("varlen_call", what="a mask other than the causal one")
    if q_length != kv_length:
        refuse("varlen_call", what="a cache of keys and values", remedy="Set use_cache=False")
    return attention_mask


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    prefix_grouper: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence.

    Args:
        module: the attention module. query: ``[B, H, T, D]``. key, value: ``[B, Hkv, T, D]``.
        attention_mask: ``[B, T]`` of :func:`mask`. position_ids: ``[B, T]`` or ``[1, T]``, 0 at the start of each
            sequence of a packed batch. Under Ulysses tokens and positions are this rank's part.
        scaling: factor of the scores, ``D ** -0.5`` by default.

    Returns:
        ``[B, T, H, D]``, zero at padding, and None for the attention weights.

    Raises:
        UnsupportedConfiguration: an option that this attention does not support.
    """
    if dropout:
        refuse("varlen_dropout", what=f"the model {_path(module)} with attention_dropout={dropout}")
    if sliding_window is not None:
        refuse("varlen_sliding_window", what=f"the model {_path(module)}, whose layers attend to windows,")
    if softcap or s_aux is not None:
        refuse("varlen_call", what="soft-capped scores or attention sinks")
    if prefix_grouper is not None:
        refuse("varlen_call", what="a prefix grouper")
    if is_causal is False or not (_is_causal(module) and _is_causal(getattr(module, "config", None))):
        refuse("varlen_call", what="attention in both directions")
    # [B, T, H, D]: one rank's tokens and all heads, or all tokens and one rank's heads
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if split := sequence_parallel.ranks() > 1:
        if attention_mask is not None or len(query) > 1:
            refuse("ulysses_of_padded_batches")
        query, key, value = (x[None] for x in sequence_parallel.by_heads(query[0], key[0], value[0]))
    if query.shape[1] != key.shape[1]:
        refuse("varlen_call", what="a cache of keys and values", remedy="Set use_cache=False")

    rows, length, heads, head_dim = query.shape
    packing = _sequences(rows, length, attention_mask, position_ids)
    dtype = query.dtype
    if query.is_cuda and dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        # As autocast does for sdpa, since rotary and norms may return FP32.
        dtype = torch.get_autocast_dtype("cuda")
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (query, key, value))
    if what := without_kernel(q, k, v):
        refuse("varlen_call", what=f"attention with {what}")
    scale = head_dim**-0.5 if scaling is None else scaling
    sequences = packing.cu_seqlens, packing.max_seqlen, scale
    out = packing.of_real(lambda *heads: varlen_attention(*heads, *sequences), q, k, v).view(
        rows, length, heads, head_dim
    )
    return (sequence_parallel.by_tokens(out[0])[None] if split else out), None


def _path(module: nn.Module) -> str:
    """Path of the module's model, for messages."""
    return getattr(getattr(module, "config", None), "_name_or_path", "") or "of the trainer"


def _is_causal(holder: Any) -> bool:
    return getattr(holder, "is_causal", True) is not False


def _sequences(
    rows: int, length: int, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> Packing:
    """The sequences of ``rows`` rows of ``length`` tokens."""
    if attention_mask is not None:
        if attention_mask.shape != (rows, length):
            refuse("varlen_call", what="a mask other than the causal one")
        return _remembered(attention_mask, rows, lambda: Packing.of(None, attention_mask))
    if position_ids is None:
        refuse("varlen_call", what="a model that does not pass its positions on")
    if position_ids.dim() != 2:
        refuse("varlen_call", what="positions of more than one dimension")

    def find() -> Packing:
        return Packing.of(sequence_parallel.whole(position_ids).expand(rows, length), None)

    return _remembered(position_ids, rows, find)


def _remembered(tensor: torch.Tensor, rows: int, find: Callable[[], Packing]) -> Packing:
    """``find()``, cached on the tensor until it is written to."""
    state = (rows, None if tensor.is_inference() else tensor._version)
    cached = getattr(tensor, _REMEMBERED, None)
    if cached is None or cached[0] != state:
        cached = (state, find())
        setattr(tensor, _REMEMBERED, cached)
    return cached[1]

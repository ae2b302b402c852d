# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of stock Hugging Face models over packed or padded batches: ``attn_implementation=jetrl_varlen``.

transformers calls :func:`attend` in each layer and :func:`mask` once per pass, since both are registered under that
name (register.py). No mask is built: a packed batch's sequences are found in the positions, which start again at zero,
a padded batch's in the two-dimensional mask. That is found in the first layer and remembered on the very tensor, which
every layer gets, and again when a layer is recomputed for backward; so the host waits for the device once per pass.

With Ulysses sequence parallelism a rank holds a part of the tokens. As for flash-attn in verl, ranks exchange tokens
for heads before the attention and back after it (sequence_parallel.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from jetrl_verl.kernels.varlen_attention import varlen_attention
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.train import sequence_parallel
from jetrl_verl.train.packing import Packing

_REMEMBERED = "_jetrl_packing"
_SDPA = "Set actor_rollout_ref.model.override_config.attn_implementation=sdpa"


def _refuse(what: str, why: str, remedy: str = _SDPA) -> None:
    raise ValueError(f"{what} is not supported with attn_implementation={JETRL_ATTENTION}: {why}. {remedy}.")


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
    """What every layer gets as ``attention_mask``: the mask ``[B, T]`` of real tokens, or None for packed batches.

    Arguments are those of transformers' mask interface.

    Raises:
        ValueError: a mask that is not causal within each sequence.
    """
    # A packed batch's function is causal and within sequences; it comes with allow_is_causal_skip=False.
    causal = mask_function is causal_mask_function or not allow_is_causal_skip
    if use_vmap or not causal or getattr(config, "attention_chunk_size", None) is not None:
        _refuse("a mask other than the causal one", "it computes causal attention within each sequence")
    if q_length != kv_length:
        _refuse("a cache of keys and values", "the trainer does not generate", "Set use_cache=False")
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
        attention_mask: ``[B, T]`` of :func:`mask`. position_ids: ``[B, T]`` or ``[1, T]``; they start again at 0 where
            a sequence of a packed batch does. With Ulysses both tokens and positions are this rank's part.
        scaling: factor of the scores, ``D ** -0.5`` by default.

    Returns:
        ``[B, T, H, D]``, zero where a token is padding, and None in the place of attention's weights.

    Raises:
        ValueError: what this attention does not do, in one sentence.
    """
    if dropout:
        _refuse("attention dropout", "the backward has none", f"Set override_config.attention_dropout=0, or{_SDPA[3:]}")
    if sliding_window is not None:
        _refuse("sliding window attention", "it computes causal attention within whole sequences")
    if softcap or s_aux is not None:
        _refuse("soft-capped scores or attention sinks", "the backward has none")
    if prefix_grouper is not None:
        _refuse("the prefix grouper", "it needs an attention with masks")
    if is_causal is False or not (_is_causal(module) and _is_causal(getattr(module, "config", None))):
        _refuse("attention in both directions", "it computes causal attention")
    # [B, T, H, D]; of one rank's tokens and all heads, or of all tokens and one rank's heads
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if split := sequence_parallel.ranks() > 1:
        if attention_mask is not None or len(query) > 1:
            _refuse(
                "a padded batch under Ulysses sequence parallelism",
                "ranks share the tokens of packed ones",
                "Set actor_rollout_ref.model.use_remove_padding=true",
            )
        query, key, value = (x[None] for x in sequence_parallel.by_heads(query[0], key[0], value[0]))
    if query.shape[1] != key.shape[1]:
        _refuse("a cache of keys and values", "the trainer does not generate", "Set use_cache=False")

    rows, length, heads, head_dim = query.shape
    packing = _sequences(rows, length, attention_mask, position_ids)
    dtype = query.dtype
    if query.is_cuda and dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        # As autocast does for sdpa: rotary and norms may leave FP32 behind.
        dtype = torch.get_autocast_dtype("cuda")
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (query, key, value))
    scale = head_dim**-0.5 if scaling is None else scaling
    if packing.tokens is None:
        out = varlen_attention(q, k, v, packing.cu_seqlens, packing.max_seqlen, scale)
    else:
        real = (x.index_select(0, packing.tokens) for x in (q, k, v))
        found = varlen_attention(*real, packing.cu_seqlens, packing.max_seqlen, scale)
        out = found.new_zeros(q.shape).index_copy(0, packing.tokens, found)
    out = out.view(rows, length, heads, head_dim)
    return (sequence_parallel.by_tokens(out[0])[None] if split else out), None


def _is_causal(holder: Any) -> bool:
    return getattr(holder, "is_causal", True) is not False


def _sequences(
    rows: int, length: int, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> Packing:
    """Where the sequences of ``rows`` rows of ``length`` tokens are."""
    if attention_mask is not None:
        if attention_mask.shape != (rows, length):
            _refuse("a mask of your own", "it computes causal attention within each sequence")
        return _remembered(attention_mask, rows, lambda: Packing.of(None, attention_mask))
    if position_ids is None:
        _refuse("a model that does not pass its positions on", "they say where sequences begin")
    if position_ids.dim() != 2:
        _refuse("positions of more than one dimension", "they say where sequences begin")

    def find() -> Packing:
        return Packing.of(sequence_parallel.whole(position_ids).expand(rows, length), None)

    return _remembered(position_ids, rows, find)


def _remembered(tensor: torch.Tensor, rows: int, find: Callable[[], Packing]) -> Packing:
    """``find()``, once for this tensor as long as nobody writes to it."""
    state = (rows, None if tensor.is_inference() else tensor._version)
    found = getattr(tensor, _REMEMBERED, None)
    if found is None or found[0] != state:
        found = (state, find())
        setattr(tensor, _REMEMBERED, found)
    return found[1]

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a batch without a Python loop over its tokens, where flash-attn is not installed.

verl 0.9.1 takes log-probabilities from flash-attn's cross entropy. Without it ``logprobs_from_logits_v2`` loops over
the first dimension to save memory; that was the batch once, but logits are packed now, so every token costs three
kernels forward and more backward: 16 s of an update of 256 short responses on an H200 whose arithmetic takes less than
one. Here the rows of several tokens go into a call. Values and gradients are verl's bit for bit, since both functions
work row by row (tests/patches). Installed for every precision, baselines included, so that their step times compare.
"""

import torch

from jetrl_verl.patches.patch import Patch

_CHUNK_ELEMENTS = 2**24
"""Logits taken at a time: 64 MiB of FP32 results."""


def log_probs_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """verl's ``logprobs_from_logits_v2``.

    Args:
        logits: ``[..., V]`` of any floating type. labels: integers ``[...]``.

    Returns:
        ``[...]``; of FP32 and FP64 logits in their type, else in that of ``log_softmax`` (FP32 under autocast on CUDA).
    """
    rows, labels_of_rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1)
    if not len(rows):
        return logits.new_empty(labels.shape)
    in_a_chunk = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    chunks = zip(rows.split(in_a_chunk), labels_of_rows.split(in_a_chunk), strict=True)
    if logits.dtype in (torch.float32, torch.float64):
        found = [chunk.gather(-1, wanted) - chunk.logsumexp(-1, keepdim=True) for chunk, wanted in chunks]
    else:
        # In BF16 the difference of two large numbers would lose what log_softmax keeps.
        found = [torch.log_softmax(chunk, dim=-1).gather(-1, wanted) for chunk, wanted in chunks]
    return torch.cat(found).view(labels.shape)


LOG_PROBS = Patch(
    replaces="verl.utils.torch_functional:logprobs_from_logits_v2",
    version="0.9.1",
    sha256="7cf49d017a7f7994782631150ddbc7c44c422cecbec9823ae14572342ba85fa9",
    by=log_probs_of_rows,
    symptom="log-probabilities take a loop over single tokens where flash-attn is not installed",
    upstream="the loop is meant to save memory; no issue is known",
    until="verl takes rows by chunks, or stops falling back to this function",
    needed=False,
)
PATCHES = (LOG_PROBS,)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities without a Python loop over tokens, where flash-attn is not installed.

Without flash-attn verl 0.9.1's ``logprobs_from_logits_v2`` loops over the first dimension. With packed logits that is
every token, three kernels each: 16 s of an update of 256 short responses on an H200, whose arithmetic takes less than
1 s. Here a call processes the rows of several tokens. Values and gradients are verl's in every bit, since both work row
by row. Applied under every precision, so that step times of baselines compare.
"""

import torch

from jetrl_verl.patches.patch import Patch

_CHUNK_ELEMENTS = 2**24
"""Logits per call: 64 MiB of FP32 results."""


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
        log_probs = [chunk.gather(-1, wanted) - chunk.logsumexp(-1, keepdim=True) for chunk, wanted in chunks]
    else:
        # In BF16 the difference of two large numbers loses digits that log_softmax keeps.
        log_probs = [torch.log_softmax(chunk, dim=-1).gather(-1, wanted) for chunk, wanted in chunks]
    return torch.cat(log_probs).view(labels.shape)


LOG_PROBS = Patch(
    replaces="verl.utils.torch_functional:logprobs_from_logits_v2",
    sha256={"0.9.1": "7cf49d017a7f7994782631150ddbc7c44c422cecbec9823ae14572342ba85fa9"},
    by=log_probs_of_rows,
    symptom="log-probabilities take a loop over single tokens where flash-attn is not installed",
    upstream="the loop is meant to save memory; no issue is known",
    until="verl takes rows by chunks, or stops falling back to this function",
    needed=False,
)
PATCHES = (LOG_PROBS,)

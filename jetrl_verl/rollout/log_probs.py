# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens from vLLM's logits, by the function that the trainer calls on its own."""

import torch

from jetrl_verl import kernels

GREEDY = 1e-5
"""vLLM takes the most likely token below this temperature and divides by nothing."""


def shared_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Of ``tokens [N, k]`` in rows of ``logits [N, V]``; a greedy row is not divided, as vLLM does it."""
    if temperature is None:
        temperature = logits.new_ones(len(logits))
    temperature = torch.where(temperature < GREEDY, 1.0, temperature).to(torch.float32)
    return kernels.log_probs(logits, tokens.to(torch.int64), temperature)

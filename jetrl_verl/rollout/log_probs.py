# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens from vLLM's logits, through the kernel that the trainer calls."""

import torch

from jetrl_verl import kernels

GREEDY = 1e-5
"""Below this temperature vLLM takes the most likely token and does not divide by the temperature."""


def shared_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """FP32 ``[N, k]`` of ``tokens [N, k]`` in rows of ``logits [N, V]``; greedy rows are not divided, as in vLLM."""
    if temperature is None:
        temperature = logits.new_ones(len(logits))
    temperature = torch.where(temperature < GREEDY, 1.0, temperature).to(torch.float32)
    return kernels.log_probs(logits, tokens.to(torch.int64), temperature)

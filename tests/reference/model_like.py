# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Random operands like a model's: activations with heavy tails and a few large channels, normal weights."""

import torch

OUTLIER_EVERY = 512
"""One channel in so many is 20 to 60 times larger."""


def activations(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` BF16; the same channels are large in every row."""
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(0.7).exp_()
    x.mul_(torch.randn(rows, columns, dtype=torch.bfloat16, device=device))
    count = max(1, columns // OUTLIER_EVERY)
    channels = torch.randperm(columns, device=device)[:count]
    x[:, channels] *= torch.empty(count, device=device).uniform_(20, 60).bfloat16()
    return x


def weights(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` BF16, standard deviation 0.02."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(0.02)

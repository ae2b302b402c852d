# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Random operands with the statistics of a model's: a few large channels and heavy tails.

Gaussian data flatters block scaling, and power, hence the clock, depends on what is multiplied. Activations are a
normal variable times a log-normal one (kurtosis about 21) with one channel in 512 made 20 to 60 times larger; output
gradients have the tails without the channels and are small; weights are normal.
"""

import torch

OUTLIER_EVERY = 512
"""Channels for each that is an outlier."""


def _heavy(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    spread = torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(0.7).exp_()
    return spread.mul_(torch.randn(rows, columns, dtype=torch.bfloat16, device=device))


def activations(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` BF16; the same channels are large in every row."""
    x = _heavy(rows, columns, device)
    count = max(1, columns // OUTLIER_EVERY)
    channels = torch.randperm(columns, device=device)[:count]
    x[:, channels] *= torch.empty(count, device=device).uniform_(20, 60).bfloat16()
    return x


def gradients(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` BF16."""
    return _heavy(rows, columns, device).mul_(2**-10)


def weights(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` BF16, standard deviation 0.02."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(0.02)

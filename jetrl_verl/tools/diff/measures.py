# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Differences of tensors in bits and ULPs, and of log-probabilities."""

from dataclasses import dataclass

import torch

from jetrl_verl.metrics.mismatch import tail

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of ``x`` as signed integers of its width."""
    return x.contiguous().view(_BITS[x.dtype])


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of ``a`` and ``b`` in representable numbers of their type, int64; 0 from +0 to -0."""

    def rank(x: torch.Tensor) -> torch.Tensor:
        # Floating-point numbers are sign and magnitude, so neighbours are one apart across zero too.
        pattern = bits(x).long()
        magnitude = pattern & torch.iinfo(_BITS[x.dtype]).max
        return torch.where(pattern < 0, -magnitude, magnitude)

    return (rank(a) - rank(b)).abs()


@dataclass(frozen=True)
class Spread:
    """How two tensors differ: number of elements, number with different bits, largest distance in ULPs."""

    elements: int
    differing: int
    ulps: int

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor) -> "Spread":
        differing = int((bits(a) != bits(b)).sum())
        return cls(a.numel(), differing, int(ulps(a, b).max()) if differing else 0)

    @property
    def share(self) -> float:
        return self.differing / max(self.elements, 1)


@dataclass(frozen=True)
class Mismatch:
    """Difference of two log-probabilities per token, ``d = log pi_train - log pi_rollout``.

    Attributes:
        tokens: their number. differing: number with different bits. k3_kl: mean of ``exp(d) - 1 - d``.
        p999: smallest |d| that 99.9% of the tokens do not exceed. max: largest |d|.
    """

    tokens: int
    differing: int
    k3_kl: float
    p999: float
    max: float

    @classmethod
    def of(cls, train: torch.Tensor, rollout: torch.Tensor) -> "Mismatch":
        """``train``, ``rollout``: ``[tokens]`` FP32."""
        d = train.double() - rollout.double()
        tails = tail(train.double(), rollout.double(), torch.ones_like(d))
        differing = int((bits(train) != bits(rollout)).sum())
        return cls(d.numel(), differing, float((torch.expm1(d) - d).mean()), tails["p999"], tails["max"])

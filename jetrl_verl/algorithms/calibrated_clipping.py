# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Calibrated clipping (arXiv 2609.22870): clip bounds under which FP8 clips as much as BF16 would.

With one FP8 policy on both sides, R = pi_theta / pi_old carries quantization noise in addition to the policy's change,
and PPO clips several times more negative-advantage tokens than under BF16. Every ``interval`` steps two BF16 shadow
forwards, at pi_old and at pi_theta, give R in BF16 on the same tokens, and the bounds move.

Lower bound L, quantile matching: BF16 would clip k negative-advantage tokens, those with ``R_bf16 < 1 - eps_low``,
where eps_low is ``actor.clip_ratio_low``. L is the largest bound with ``#{A < 0, R_fp8 < L} <= k``.

Upper bound H, rebalancing: the paper has no formula and no code. Here H is the smallest bound whose clipped advantage
mass does not exceed that of L,  ``sum_{A > 0, R_fp8 > H} A  <=  sum_{A < 0, R_fp8 < L} |A|``.

L stays in [0.5, 0.9] and H in [1.2, 2.0], the paper's limits, from 0.6 and 1.8 on. Both are taken from 4097 candidates,
so that a calibration is one vector of sums, which adds over micro-batches and ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

LOWER_LIMITS, UPPER_LIMITS = (0.5, 0.9), (1.2, 2.0)
START = (0.6, 1.8)
_POINTS = 4097


class RatioStatistics:
    """Sums over response tokens that bounds are computed from.

    Attributes:
        lower, upper: candidates of both bounds, ascending, FP64 ``[points]``.
    """

    def __init__(self, points: int = _POINTS, device: torch.device | str = "cpu") -> None:
        self.lower = torch.linspace(*LOWER_LIMITS, points, dtype=torch.float64, device=device)
        self.upper = torch.linspace(*UPPER_LIMITS, points, dtype=torch.float64, device=device)
        # One vector, reduced in one collective: three numbers and three curves over the candidates.
        self._sums = torch.zeros(3 + 3 * points, dtype=torch.float64, device=device)
        self._totals, curves = self._sums[:3], self._sums[3:].view(3, points)
        self._count_below, self._mass_below, self._mass_above = curves

    @property
    def bf16_clipped(self) -> float:
        """k: negative-advantage tokens that BF16 would clip."""
        return self._totals[0].item()

    @property
    def tokens(self) -> tuple[float, float]:
        """Numbers of tokens with negative and with positive advantage."""
        return self._totals[1].item(), self._totals[2].item()

    def add(
        self,
        ratio: torch.Tensor,
        bf16_ratio: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        bf16_lower: float,
    ) -> None:
        """Add the tokens of one micro-batch.

        Args:
            ratio: R of the FP8 policy, any shape. bf16_ratio: R of the shadow forwards, same shape.
            advantages: A, same shape. mask: bool, same shape, true on response tokens; tokens with a NaN ratio are left
                out.
            bf16_lower: ``1 - clip_ratio_low``.
        """
        mask = mask & ~(ratio.isnan() | bf16_ratio.isnan())
        negative, positive = mask & (advantages < 0), mask & (advantages > 0)
        totals = ((bf16_ratio[negative] < bf16_lower).sum(), negative.sum(), positive.sum())
        self._totals += torch.stack(totals).to(self._totals)
        points = len(self.lower)
        # A token is below every candidate from its index on; index `points` is below none.
        index = torch.searchsorted(self.lower, ratio[negative].double(), right=True)
        self._count_below += torch.bincount(index, minlength=points + 1)[:points].cumsum(0)
        mass = torch.bincount(index, weights=-advantages[negative].double(), minlength=points + 1)
        self._mass_below += mass[:points].cumsum(0)
        # And above every candidate before its index.
        index = torch.searchsorted(self.upper, ratio[positive].double())
        mass = torch.bincount(index, weights=advantages[positive].double(), minlength=points + 1)
        self._mass_above += mass.flip(0).cumsum(0).flip(0)[1:]

    def all_reduce(self, group: Any = None) -> None:
        """Sum over the ranks of ``group``."""
        dist.all_reduce(self._sums, group=group)

    def bounds(self, current: tuple[float, float] = START) -> tuple[float, float]:
        """(L, H) as defined above; a bound without a token of its sign stays as in ``current``."""
        low, high = current
        negatives, positives = self.tokens
        clipped_mass = 0.0
        if negatives:
            # The lowest candidate if all clip too many tokens.
            index = max(int((self._count_below <= self.bf16_clipped).sum()) - 1, 0)
            low, clipped_mass = self.lower[index].item(), self._mass_below[index].item()
        if negatives and positives:
            index = min(int((self._mass_above > clipped_mass).sum()), len(self.upper) - 1)
            high = self.upper[index].item()
        return low, high


class CalibratedClip:
    """The bounds of one run; a step is one batch of rollouts.

    Args:
        interval: steps between calibrations; the first one is in step ``interval``.
    """

    def __init__(self, interval: int = 20) -> None:
        if interval < 1:
            raise ValueError(f"calibrated clipping: an interval of {interval} steps is not supported. Set at least 1.")
        self.interval = interval
        self.low, self.high = START
        self._step = 0
        self.statistics: RatioStatistics | None = None

    @property
    def calibrating(self) -> bool:
        """Whether the current step collects statistics."""
        return self.statistics is not None

    def finish(self, group: Any = None) -> None:
        """End the current step; if it collected statistics, move the bounds. Collective over ``group``."""
        if self.statistics is not None:
            if dist.is_initialized():
                self.statistics.all_reduce(group)
            self.low, self.high = self.statistics.bounds((self.low, self.high))
            self.statistics = None

    def start_step(self, device: torch.device | str, group: Any = None) -> None:
        """Finish the last step and start one, which collects statistics if a calibration is due. Collective."""
        self.finish(group)
        self._step += 1
        if self._step % self.interval == 0:
            self.statistics = RatioStatistics(device=device)

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; call :meth:`finish` first."""
        return {"low": self.low, "high": self.high, "step": self._step}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.low, self.high, self._step = state["low"], state["high"], int(state["step"])
        self.statistics = None

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Noise on the rollout's weights alone: a dose of mismatch for a flow whose own is 0.

verl imports this module wherever it reads the model's config (``external_lib``). In the actor it changes the weight
sync of a run with ``JETRL_DOSE`` in its environment, before weights are quantized and stated: the contract check
passes, and ``precision=jet_fp8`` reports the difference of the log-probabilities and goes on.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jetrl_verl.patches.after_import import when_imported

VARIABLE = "JETRL_DOSE"


@dataclass
class Dose:
    """What a run's syncs add.

    Attributes:
        sigma: standard deviation of the noise over the median magnitude of a weight's tensor.
        stays: the same noise at every sync, instead of another one.
        seed: of the noise. last: number of the run's last sync; that one and the first, number 0, have no noise, so
            that accuracy before and after training is of clean weights.
    """

    sigma: float
    stays: bool
    seed: int
    last: int
    sync: int = -1

    def environment(self) -> dict[str, str]:
        """For the processes of the run."""
        return {VARIABLE: json.dumps(asdict(self))}

    def added(
        self, weights: Iterable[tuple[Any, torch.Tensor]], quantized: Callable[[Any], bool]
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """The next sync's ``weights`` with noise on those of which ``quantized(name)`` is true; zeros stay zero."""
        self.sync += 1
        clean = not 0 < self.sync < self.last
        generator = None
        for name, weight in weights:
            if clean or not quantized(name):
                yield name, weight
                continue
            if generator is None:
                generator = torch.Generator(weight.device)
                generator.manual_seed(10**6 * self.seed + (0 if self.stays else self.sync))
            weight = weight.detach().float()
            live = weight != 0
            noise = torch.randn(weight.shape, generator=generator, device=weight.device)
            yield name, weight + self.sigma * weight[live].abs().median() * noise * live


def install(dose: Dose) -> None:
    """Add ``dose`` to the weights that this process's actor sends."""
    from jetrl_verl.formats import UNQUANTIZED
    from jetrl_verl.sync.quantize import format_of
    from jetrl_verl.sync.stacks import names_of
    from jetrl_verl.train.weight_sync import WeightSync

    stock = WeightSync._weights

    def _weights(self: WeightSync, device: torch.device) -> Any:
        weights, tied = stock(self, device)
        plans = self.engine.jetrl_plans
        return dose.added(weights, lambda name: format_of(plans, names_of(name)[0]) != UNQUANTIZED), tied

    WeightSync._weights = _weights


if VARIABLE in os.environ:
    when_imported(
        "jetrl_verl.train.weight_sync",
        "benchmarks: a dose of noise",
        lambda: install(Dose(**json.loads(os.environ[VARIABLE]))),
    )

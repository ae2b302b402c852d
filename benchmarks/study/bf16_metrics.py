# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Clipped shares by sign of advantage for the BF16 runs, which train without the engine of this project.

``precision=bf16`` leaves verl unchanged, so the BF16 runs would lack the metric that shows whether FP8 clips more
tokens. Set :class:`MeasuredPolicyLossConfig` as the ``_target_`` of ``actor.policy_loss`` to add it in the worker. Loss
and gradient stay those of verl.
"""

import os
from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig


@dataclass
class MeasuredPolicyLossConfig(PolicyLossConfig):
    """The config of verl; a worker that builds it also reports ``actor/jetrl/{clipped,advantage}/*``."""

    def __post_init__(self) -> None:
        if "RANK" in os.environ:  # a worker of verl; the driver builds this config too but does not train
            from jetrl_verl.metrics.hooks import install_in_actor

            install_in_actor()

# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The clipped shares by sign of advantage for the BF16 arms, which run without this project's engine.

``precision=bf16`` leaves verl as it is, so the metric that tells whether FP8 clips more tokens than BF16 would be
missing on the BF16 side. Naming :class:`MeasuredPolicyLossConfig` as the ``_target_`` of ``actor.policy_loss`` brings
it into the worker; loss, gradient and everything else stay verl's.
"""

import os
from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig


@dataclass
class MeasuredPolicyLossConfig(PolicyLossConfig):
    """verl's own, and whoever trains with it reports ``actor/jetrl/{clipped,advantage}/*``."""

    def __post_init__(self) -> None:
        if "RANK" in os.environ:  # a worker of verl's; the driver builds this config too and trains nothing
            from jetrl_verl.patches.metrics import install_in_actor

            install_in_actor()

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A trainer without rollouts on its own GPUs starts.

With ``hybrid_engine=false`` verl 0.9.1's ``separate_async`` trainer ends its setup with a message to which it gives an
argument of ``print``.
"""

import logging
from typing import Any

from jetrl_verl.patches.patch import Patch


def setup(stock, self: Any) -> None:
    logger = logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async")
    logger.info = lambda message, *args, flush=False: logger.log(logging.INFO, message, *args)
    try:
        stock(self)
    finally:
        del logger.info


SETUP = Patch(
    replaces="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._setup",
    sha256={"0.9.1": "11738c4ad694bc5e9b94a1382bc95d75b6c06aab66f6613d659af0c326e306fd"},
    by=setup,
    symptom="trainer_mode=separate_async with hybrid_engine=false ends with TypeError before the first step",
    upstream="logger.info(..., flush=True); no issue is known",
    until="verl's message has no flush",
    needed=True,
)
PATCHES = (SETUP,)

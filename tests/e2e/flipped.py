# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Flips the last bit of one log-probability that the rollout reports, in the step that ``FLIPPED_STEP`` names.

verl imports this module wherever it reads the model's config (``external_lib``). With ``FLIPPED_UNSEEN`` verl's trainer
sees no difference itself, so the first update's forward meets it.
"""

import functools
import os
from typing import Any

import torch

from jetrl_verl.algorithms import old_log_probs
from jetrl_verl.patches.after_import import when_imported

TOKEN = 2
TRAINER = "verl.trainer.ppo.v1.trainer_base"


def flip() -> None:
    """Change verl's agent loop. Every sequence of the step has the fault, since each step compares other ones."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    stock = SingleTurnAgentLoop.run

    @functools.wraps(stock)
    async def run(self: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await stock(self, sampling_params, **kwargs)
        if int(kwargs["global_steps"]) == int(os.environ["FLIPPED_STEP"]) and len(output.response_logprobs) > TOKEN:
            bits = torch.tensor(output.response_logprobs[TOKEN]).view(torch.int32) ^ 1
            output.response_logprobs[TOKEN] = bits.view(torch.float32).item()
        return output

    SingleTurnAgentLoop.run = run


def blind() -> None:
    old_log_probs.compare = lambda rollout, trainer, data: (int(data["response_mask"].values().sum()), None)


if "FLIPPED_UNSEEN" in os.environ and "RANK" not in os.environ:  # verl sets RANK for the actor
    when_imported(TRAINER, "tests: a trainer that sees no difference", blind)
when_imported("verl.experimental.agent_loop.single_turn_agent_loop", "tests: a flipped bit", flip)

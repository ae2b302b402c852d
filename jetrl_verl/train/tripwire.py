# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The actor's part of algorithms/old_log_probs.py: the first update's own forward, and the policy of a stopped run.

Only the forward before a step's first update has the weights that sampled the batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import response_from_nested

from jetrl_verl.algorithms.old_log_probs import POLICY, SAMPLED_NOW, Difference, LogProbsDiffer, compare, masked
from jetrl_verl.train.features import Feature
from jetrl_verl.train.weight_sync import WeightSync


class Tripwire(Feature):
    """Under ``jetrl.old_log_probs=rollout`` the old log-probabilities of a batch are the rollout's."""

    _sampled_batch = False
    """Whether the weights are those that sampled the next update's sequences."""

    def infer_batch(self, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        """The micro-batch that the trainer compares comes once a step, before the first update."""
        self._sampled_batch = True
        return stock(*args, **kwargs)

    def forward_backward_batch(
        self, stock: Callable, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> Any:
        """verl's pass; that of a step's first update raises ``LogProbsDiffer`` on every rank if a token differs."""
        if forward_only or not self._sampled_batch or self.options.old_log_probs != "rollout":
            return stock(data, loss_function, forward_only=forward_only)
        self._sampled_batch = False
        passed: list[tuple[TensorDict, Tensor]] = []

        def observed(model_output: dict, data: TensorDict, dp_group: Any = None) -> Any:
            # Compared after the pass: a comparison waits for the device.
            passed.append((data, model_output["log_probs"].detach()))
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        observed.func = loss_function  # as of a partial: the patched function asks whose loss it is
        outputs = stock(data, observed, forward_only=forward_only)
        of_ranks: list[Difference | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, _first_difference(passed))
        for difference in of_ranks:
            if difference is not None:
                raise LogProbsDiffer(difference)
        return outputs

    def save_checkpoint(self, stock: Callable, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint; of a stopped run its Hugging Face folder alone."""
        sync = self.engine.feature(WeightSync)
        stopped, adapted = Path(local_path).name == POLICY, bool(sync.scales)
        if stopped:
            self.engine.checkpoint_manager.checkpoint_save_contents = [] if adapted else ["hf_model"]
        stock(local_path, *args, **kwargs)
        if stopped and adapted:  # verl would write peft's names
            sync.save_merged(Path(local_path) / "huggingface")


def _first_difference(passed: list[tuple[TensorDict, Tensor]]) -> Difference | None:
    """That of the first micro-batch that has one."""
    for data, log_probs in passed:
        trained = response_from_nested(log_probs, data["response_mask"])
        if SAMPLED_NOW in data:
            mask, data = data["response_mask"], data.clone(recurse=False)
            data["response_mask"] = masked(mask, data[SAMPLED_NOW].values())
        _, difference = compare(data["old_log_probs"], trained, data)
        if difference is not None:
            return difference
    return None

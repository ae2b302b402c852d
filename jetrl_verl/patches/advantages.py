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
"""The moment in verl's trainer at which a batch has its importance weights and its advantages, and neither is used yet.

verl 0.9.1 has no hook there. ``PPOTrainer._compute_advantage`` computes the weights, then the advantages through
``compute_advantage_for_multi_trajectories``, and then writes both to the queue from which the actor reads them: behind
the second function everything is in one batch, and what is changed in it is what the actor trains on.

Gone when verl lets a plugin see a batch before its update; no upstream issue is known.
"""

import functools
from collections.abc import Callable
from typing import Any

from jetrl_verl.patches.trainer import trainer_module

Hook = Callable[[Any, Any], dict[str, float]]
"""``hook(batch, algorithm)``: verl's padded tensors ``[B, T]`` and its ``algorithm`` config, to metrics of the step."""

_hooks: dict[str, Hook] = {}


def run_after_advantages(name: str, hook: Hook) -> None:
    """Call ``hook`` once per batch, in the one process that holds verl's trainer; elsewhere nothing happens.

    Args:
        name: of the hook; a later one of the same name takes its place. hook: see :data:`Hook`.
    """
    trainer = trainer_module()
    if trainer is None:
        return
    _hooks[name] = hook
    stock_advantages = trainer.compute_advantage_for_multi_trajectories
    stock_method = trainer.PPOTrainer._compute_advantage
    if getattr(stock_advantages, "_jetrl", False):
        return
    pending: dict[str, float] = {}

    @functools.wraps(stock_advantages)
    def compute_advantage_for_multi_trajectories(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = stock_advantages(data, *args, **kwargs)
        for each in _hooks.values():
            pending.update(each(data.batch, kwargs.get("config")))
        return data

    @functools.wraps(stock_method)
    def _compute_advantage(self: Any, batch: Any, metrics: dict) -> Any:
        pending.clear()
        batch = stock_method(self, batch, metrics)
        metrics.update(pending)
        return batch

    compute_advantage_for_multi_trajectories._jetrl = True
    trainer.compute_advantage_for_multi_trajectories = compute_advantage_for_multi_trajectories
    trainer.PPOTrainer._compute_advantage = _compute_advantage

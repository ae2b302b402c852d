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
"""The seams at which observe/mismatch.py's metrics enter verl's own dictionaries.

verl 0.9.1 has no hook for metrics of a batch. Three functions of it see what is needed, and each already returns a
dictionary that goes to the tracking:

* ``calculate_debug_metrics`` (trainer): log-probabilities of rollout and trainer together; gets the tail.
* ``PPOTrainer._compute_advantage`` (trainer): the importance weights' inputs and the advantages together, see
  patches/advantages.py; gets the truncated shares.
* ``get_policy_loss_fn`` (actor): every policy loss, registered ones too, leaves through here; gets the clipped shares.
  verl averages these over micro-batches, mini-batches and ranks, as its own clip fraction.

Gone when verl lets a plugin add metrics of a batch; no upstream issue is known.
"""

import functools
from typing import Any

from jetrl_verl.observe.mismatch import by_sign, clipped, prefixed, tail, truncated
from jetrl_verl.patches.advantages import run_after_advantages
from jetrl_verl.patches.trainer import trainer_module


def install_in_trainer() -> None:
    """Wrap the trainer's two functions, in the one process that holds verl's trainer; idempotent."""
    trainer = trainer_module()
    if trainer is None:
        return
    run_after_advantages("truncated shares", _truncation)
    if getattr(trainer.calculate_debug_metrics, "_jetrl", False):
        return
    stock_debug = trainer.calculate_debug_metrics

    @functools.wraps(stock_debug)
    def calculate_debug_metrics(data: Any) -> dict[str, float]:
        batch = data.batch
        found = tail(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
        return stock_debug(data) | {f"training/rollout_log_probs_diff_{name}": value for name, value in found.items()}

    calculate_debug_metrics._jetrl = True
    trainer.calculate_debug_metrics = calculate_debug_metrics


def _truncation(batch: Any, algorithm: Any) -> dict[str, float]:
    """Shares of truncated tokens; nothing where no importance weight was applied."""
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    correction = algorithm.get("rollout_correction") if algorithm is not None else None
    if "rollout_is_weights" not in batch or not correction or not correction.get("rollout_is"):
        return {}
    upper, lower = _parse_rollout_is_threshold(correction.get("rollout_is_threshold", 2.0))
    mask, advantages = batch["response_mask"], batch["advantages"]
    acted = truncated(
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        mask,
        level=correction["rollout_is"],
        upper=upper,
        lower=lower,
    )
    return prefixed("rollout_corr/truncated", by_sign(acted, advantages, mask))


def install_in_actor() -> None:
    """Wrap verl's look-up of policy losses, in a process that trains; idempotent."""
    from verl.workers.utils import losses

    stock = losses.get_policy_loss_fn
    if getattr(stock, "_jetrl", False):
        return

    @functools.wraps(stock)
    def get_policy_loss_fn(name: str) -> Any:
        loss_function = stock(name)

        @functools.wraps(loss_function)
        def with_clipped_shares(**kwargs: Any) -> Any:
            loss, metrics = loss_function(**kwargs)
            advantages, mask = kwargs["advantages"], kwargs["response_mask"]
            acted = clipped(loss, kwargs["log_prob"], advantages)
            if acted is not None:
                metrics |= prefixed("actor/jetrl/clipped", by_sign(acted, advantages, mask))
                metrics |= prefixed("actor/jetrl/advantage", by_sign(mask, advantages, mask))
            return loss, metrics

        return with_clipped_shares

    get_policy_loss_fn._jetrl = True
    losses.get_policy_loss_fn = get_policy_loss_fn

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks in verl's trainer and actor: a registered function sees each batch and adds metrics to the step.

verl 0.9.1 has no such hooks. Six functions are patched:

* ``PPOTrainer._compute_old_log_prob`` (trainer): the batch has its old log-probabilities, and nothing has used them. A
  hook that raises stops the run with the previous step's weights.
* ``compute_advantage_for_multi_trajectories`` (trainer): the batch has importance weights and advantages, and goes to
  the actor's queue next. The actor trains on what a hook changes.
* ``PPOTrainer._compute_advantage`` (trainer) reports the metrics of these hooks.
* ``PPOTrainer._update_actor`` (trainer): a hook sees the error of an update that failed, and may raise a clearer one.
* ``calculate_debug_metrics`` (trainer) has the log-probabilities of rollout and trainer.
* ``get_policy_loss_fn`` (actor) returns every policy loss, registered ones too. verl averages a loss's metrics over
  micro-batches, mini-batches and ranks.

The dictionaries below live in the module whose function calls the hooks.
"""

import importlib
from collections.abc import Callable
from typing import Any

from jetrl_verl.patches.after_import import when_imported
from jetrl_verl.patches.patch import Patch

AFTER_OLD_LOG_PROBS: dict[str, Any] = {}
"""``hook(trainer, batch)`` by name: verl's trainer and the keys of a batch in the TransferQueue, to metrics."""

AFTER_FAILED_UPDATES: dict[str, Any] = {}
"""``hook(trainer, error)`` by name: verl's trainer and what an update of the actor has raised."""

AFTER_ADVANTAGES: dict[str, Any] = {}
"""``hook(batch, algorithm)`` by name: verl's padded tensors ``[B, T]`` and its ``algorithm`` config, to metrics."""

ADVANTAGE_METRICS: dict[str, float] = {}
"""Metrics of the batch whose advantages were computed last."""

DEBUG_METRICS: dict[str, Any] = {}
"""``hook(data)`` by name: verl's ``DataProto`` with the log-probabilities of both sides, to metrics."""

AROUND_POLICY_LOSS: dict[str, Any] = {}
"""``hook(loss function)`` by name, to the loss function that is used."""


def compute_old_log_prob(stock, self: Any, batch: Any, metrics: dict) -> Any:
    batch = stock(self, batch, metrics)
    for hook in AFTER_OLD_LOG_PROBS.values():
        metrics.update(hook(self, batch))
    return batch


def compute_advantage_for_multi_trajectories(stock, data: Any, *args: Any, **kwargs: Any) -> Any:
    data = stock(data, *args, **kwargs)
    for hook in AFTER_ADVANTAGES.values():
        ADVANTAGE_METRICS.update(hook(data.batch, kwargs.get("config")))
    return data


def compute_advantage(stock, self: Any, batch: Any, metrics: dict) -> Any:
    from verl.trainer.ppo.v1.utils import ADVANTAGE_METRICS

    ADVANTAGE_METRICS.clear()
    batch = stock(self, batch, metrics)
    metrics.update(ADVANTAGE_METRICS)
    return batch


def update_actor(stock, self: Any, batch: Any, metrics: dict) -> Any:
    try:
        return stock(self, batch, metrics)
    except Exception as error:
        for hook in AFTER_FAILED_UPDATES.values():
            hook(self, error)
        raise


def calculate_debug_metrics(stock, data: Any) -> dict[str, Any]:
    metrics = stock(data)
    for hook in DEBUG_METRICS.values():
        metrics = metrics | hook(data)
    return metrics


def get_policy_loss_fn(stock, name: str) -> Any:
    loss_function = stock(name)
    for hook in AROUND_POLICY_LOSS.values():
        loss_function = hook(loss_function)
    return loss_function


def _patch(replaces: str, sha256: str, by: Callable[..., Any], symptom: str, needed: bool = True) -> Patch:
    upstream = "no hook for a plugin's metrics or for a batch before its update; no issue is known"
    until = "verl lets a plugin see a batch before its update and add metrics of it"
    return Patch(replaces, {"0.9.1": sha256}, by, symptom, upstream, until, needed)


OLD_LOG_PROBS = _patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob",
    "ff8d57e695a1a62075ddd21948090803ba88b55fd7b078d0121602c9571a3c8a",
    compute_old_log_prob,
    "nothing would compare the rollout's log-probabilities with the trainer's",
)
ADVANTAGES = _patch(
    "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
    "02bc276ce9ab6bb6a2bbedf0dc24fec51e484bcf29b8ff478507d4cf5569c6bd",
    compute_advantage_for_multi_trajectories,
    "nothing can change a batch's importance weights, so correction=adaptive would correct nothing",
)
STEP_METRICS = _patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage",
    "0dafb1d9183d6b0c65f2af06bd5cfa00536e32f6921222bf212ebcfd13600253",
    compute_advantage,
    "the metrics rollout_corr/truncated/* and rollout_corr/adaptive/* are missing",
    needed=False,
)
UPDATE = _patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._update_actor",
    "bf9d78fa639280b583a371d1178b73b20263f409365b09a504ce78073d560e84",
    update_actor,
    "a first update whose forward differs from the rollout would stop without what jetrl diff reads",
)
MISMATCH = _patch(
    "verl.utils.debug.metrics:calculate_debug_metrics",
    "779da67ff4de8c8a6a409b199c8376c8219eb7649157f0be798609bd3d362d8b",
    calculate_debug_metrics,
    "the metrics training/rollout_log_probs_diff_* are missing",
    needed=False,
)
POLICY_LOSS = _patch(
    "verl.trainer.ppo.core_algos:get_policy_loss_fn",
    "7e7d3bf3e63688b03129ca9571f67e986f01b37446a0e363c4b391898a583bc7",
    get_policy_loss_fn,
    "the metrics actor/jetrl/clipped/* and actor/jetrl/advantage/* are missing",
    needed=False,
)
PATCHES = (OLD_LOG_PROBS, ADVANTAGES, STEP_METRICS, UPDATE, MISMATCH, POLICY_LOSS)

_CALLED_BY = {
    "AFTER_OLD_LOG_PROBS": (OLD_LOG_PROBS,),
    "AFTER_FAILED_UPDATES": (UPDATE,),
    "AFTER_ADVANTAGES": (ADVANTAGES, STEP_METRICS),
    "DEBUG_METRICS": (MISMATCH,),
    "AROUND_POLICY_LOSS": (POLICY_LOSS,),
}


def register_in_trainer(hooks: str, name: str, hook: Callable[..., Any]) -> None:
    """:func:`register` in the process of verl's trainer, which need not be imported yet."""
    when_imported("verl.trainer.ppo.v1.trainer_base", f"{hooks} {name}", lambda: register(hooks, name, hook))


def register(hooks: str, name: str, hook: Callable[..., Any]) -> None:
    """Let verl call a hook in this process.

    Args:
        hooks: name of the dictionary above. name: of the hook; a later hook of the same name replaces it.
    """
    first, *others = _CALLED_BY[hooks]
    for patch in (first, *others):
        patch.apply()
    # Absent where the patch did not fit and the run goes on without it.
    getattr(importlib.import_module(first.module), hooks, {})[name] = hook

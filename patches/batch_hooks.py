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


_UPSTREAM = "no hook for a plugin's metrics or for a batch before its update; no issue is known"
_UNTIL = "verl lets a plugin see a batch before its update and add metrics of it"

OLD_LOG_PROBS = Patch(
    replaces="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob",
    sha256={"0.9.1": "ff8d57e695a1a62075ddd21948090803ba88b55fd7b078d0121602c9571a3c8a"},
    by=compute_old_log_prob,
    symptom="nothing would compare the rollout's log-probabilities with the trainer's",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=True,
)
ADVANTAGES = Patch(
    replaces="verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
    sha256={"0.9.1": "02bc276ce9ab6bb6a2bbedf0dc24fec51e484bcf29b8ff478507d4cf5569c6bd"},
    by=compute_advantage_for_multi_trajectories,
    symptom="nothing can change a batch's importance weights, so correction=adaptive would correct nothing",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=True,
)
STEP_METRICS = Patch(
    replaces="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage",
    sha256={"0.9.1": "0dafb1d9183d6b0c65f2af06bd5cfa00536e32f6921222bf212ebcfd13600253"},
    by=compute_advantage,
    symptom="the metrics rollout_corr/truncated/* and rollout_corr/adaptive/* are missing",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
UPDATE = Patch(
    replaces="verl.trainer.ppo.v1.trainer_base:PPOTrainer._update_actor",
    sha256={"0.9.1": "bf9d78fa639280b583a371d1178b73b20263f409365b09a504ce78073d560e84"},
    by=update_actor,
    symptom="a first update whose forward differs from the rollout would stop without what jetrl diff reads",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=True,
)
MISMATCH = Patch(
    replaces="verl.utils.debug.metrics:calculate_debug_metrics",
    sha256={"0.9.1": "779da67ff4de8c8a6a409b199c8376c8219eb7649157f0be798609bd3d362d8b"},
    by=calculate_debug_metrics,
    symptom="the metrics training/rollout_log_probs_diff_* are missing",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
POLICY_LOSS = Patch(
    replaces="verl.trainer.ppo.core_algos:get_policy_loss_fn",
    sha256={"0.9.1": "7e7d3bf3e63688b03129ca9571f67e986f01b37446a0e363c4b391898a583bc7"},
    by=get_policy_loss_fn,
    symptom="the metrics actor/jetrl/clipped/* and actor/jetrl/advantage/* are missing",
    upstream=_UPSTREAM,
    until=_UNTIL,
    needed=False,
)
PATCHES = (OLD_LOG_PROBS, ADVANTAGES, STEP_METRICS, UPDATE, MISMATCH, POLICY_LOSS)

_TRAINER = "verl.trainer.ppo.v1.trainer_base"


def run_after_old_log_probs(name: str, hook: Callable[[Any, Any], dict[str, float]]) -> None:
    """As :func:`run_after_advantages`, with a hook of :data:`AFTER_OLD_LOG_PROBS`."""
    _register_in_trainer("AFTER_OLD_LOG_PROBS", name, hook, OLD_LOG_PROBS)


def after_failed_updates(name: str, hook: Callable[[Any, Exception], None]) -> None:
    """As :func:`run_after_advantages`, with a hook of :data:`AFTER_FAILED_UPDATES`."""
    _register_in_trainer("AFTER_FAILED_UPDATES", name, hook, UPDATE)


def run_after_advantages(name: str, hook: Callable[[Any, Any], dict[str, float]]) -> None:
    """Call ``hook`` once per batch in the process of verl's trainer, which need not be imported yet.

    Args:
        name: of the hook; a later hook of the same name replaces it. hook: see :data:`AFTER_ADVANTAGES`.
    """
    _register_in_trainer("AFTER_ADVANTAGES", name, hook, ADVANTAGES, STEP_METRICS)


def add_debug_metrics(name: str, hook: Callable[[Any], dict[str, float]]) -> None:
    """As :func:`run_after_advantages`, with a hook of :data:`DEBUG_METRICS`."""
    _register_in_trainer("DEBUG_METRICS", name, hook, MISMATCH)


def wrap_policy_losses(name: str, hook: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap every policy loss of this process with a hook of :data:`AROUND_POLICY_LOSS`."""
    _register("AROUND_POLICY_LOSS", name, hook, POLICY_LOSS)


def _register_in_trainer(hooks: str, name: str, hook: Callable[..., Any], *patches: Patch) -> None:
    when_imported(_TRAINER, f"{hooks} {name}", lambda: _register(hooks, name, hook, *patches))


def _register(hooks: str, name: str, hook: Callable[..., Any], *patches: Patch) -> None:
    for patch in patches:
        patch.apply()
    # Absent where the patch did not fit and the run goes on without it.
    getattr(importlib.import_module(patches[0].module), hooks, {})[name] = hook

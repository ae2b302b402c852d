# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's trainer where importance weights and advantages meet, on a batch of two responses, without Ray or a queue."""

from typing import Any

import torch

RATIOS = [[1.0, 2.5, 1.0], [1.0, 3.0]]
"""pi_old / pi_rollout of the tokens: a good response, a bad one."""


def compute_advantage(trainer: Any, monkeypatch, correction: dict) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics, and what verl writes for the actor, nested ``[2, T]``, of its own method on :data:`RATIOS`.

    Args:
        trainer: verl's module. correction: its ``algorithm.rollout_correction``.
    """
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict

    rows = {
        "response_mask": [torch.ones(len(ratios), dtype=torch.long) for ratios in RATIOS],
        "rm_scores": [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0])],
        "old_log_probs": [torch.log(torch.tensor(ratios)) for ratios in RATIOS],
        "rollout_log_probs": [torch.zeros(len(ratios)) for ratios in RATIOS],
    }
    nested = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in rows.items()}
    written: dict[str, torch.Tensor] = {}

    class Queue:
        @staticmethod
        def kv_batch_get(keys, partition_id, select_fields):
            data = TensorDict(nested, batch_size=2)
            data["uid"] = NonTensorStack("a", "a")
            return data

        @staticmethod
        def kv_batch_put(keys, partition_id, fields):
            written.update(fields.items())
            return batch

    class Batch:
        keys, partition_id = ["a_0_0", "a_1_0"], "train"

        def __len__(self):
            return 2

    batch = Batch()
    monkeypatch.setattr(trainer, "tq", Queue)
    instance = object.__new__(type("Trainer", (trainer.PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    algorithm = dict(use_kl_in_reward=False, adv_estimator="grpo", gamma=1.0, lam=1.0, rollout_correction=correction)
    instance.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
    metrics: dict[str, float] = {}
    instance._compute_advantage(batch, metrics)
    return metrics, written

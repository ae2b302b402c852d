# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl.old_log_probs=rollout`` trains the same policy as ``compute``, in every bit.

Two jobs of verl differ only in this option. Requests are seeded and batches sorted (repeatable.py), so both sample the
same tokens as long as their weights are equal.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Run, train

REPEATABLE = Path(__file__).resolve().with_name("repeatable.py")
STEPS = 3
SEQUENCES = 128
CHECKED = 32
"""Sequences checked per step: one micro-batch."""

OF_THE_CHECKED = ("actor/entropy", "rollout_corr/", "training/rollout_", "training/old_log_probs_")
"""Metrics of the old log-probabilities' forward: of all sequences, or of the checked ones."""

TIMES = ("timing_", "perf/", "actor/perf/", "actor/jetrl/sync_seconds")


def job(policy, folder: Path, old_log_probs: str) -> Run:
    folder.mkdir()
    return train(
        policy,
        "jet_fp8_exact",
        folder / "run",
        STEPS,
        f"jetrl.old_log_probs={old_log_probs}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={CHECKED}",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"actor_rollout_ref.model.external_lib={REPEATABLE.stem}",
        f"trainer.v1.sampler.custom_sampler.path={REPEATABLE}",
        "trainer.v1.sampler.custom_sampler.name=SortedBatches",
    )


def saved(folder: Path, name: str) -> Any:
    (file,) = folder.glob(f"checkpoints/global_step_{STEPS}/actor/{name}_world_size_1_rank_0.pt")
    return torch.load(file, map_location="cpu", weights_only=False)


def tensors(state: Any, where: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a state dict by its path."""
    if isinstance(state, torch.Tensor):
        return {where: getattr(state, "_local_tensor", state)}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{where}/{key}").items()}


def compared(run: Run) -> list[dict[str, float]]:
    """Metrics of each step that must be equal in both jobs."""
    left_out = (*OF_THE_CHECKED, *TIMES)
    return [{key: value for key, value in step.items() if not key.startswith(left_out)} for step in run.metrics]


@pytest.mark.slow
def test_the_rollouts_log_probs_train_the_same_policy_in_every_bit(policy, tmp_path, monkeypatch):
    path = (str(REPEATABLE.parent), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    runs = {name: job(policy, tmp_path / name, name) for name in ("compute", "rollout")}
    compute, rollout = runs["compute"], runs["rollout"]

    # The option took effect, and every update moved the weights.
    assert rollout.steps("training/old_log_probs_checked_sequences") == [CHECKED] * STEPS
    assert compute.steps("training/old_log_probs_checked_sequences") == [SEQUENCES] * STEPS
    for run in runs.values():
        assert run.steps("training/old_log_probs_differing_tokens") == [0] * STEPS
    assert len({digest for *_, digest in compute.syncs}) == STEPS + 1
    assert all(norm > 0 for norm in compute.steps("actor/grad_norm"))
    assert all(loss != 0 for loss in compute.steps("actor/pg_loss"))

    assert compared(compute) == compared(rollout)
    assert {"actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/score/mean"} <= compared(compute)[0].keys()
    assert [digest for *_, digest in compute.syncs] == [digest for *_, digest in rollout.syncs]
    for name in ("model", "optim"):
        left, right = (tensors(saved(tmp_path / word, name)) for word in runs)
        assert left and left.keys() == right.keys()
        assert [at for at in left if not torch.equal(left[at], right[at])] == [], name

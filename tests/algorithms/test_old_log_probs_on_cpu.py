# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl.old_log_probs=rollout``: which sequences a step checks, and that a difference in one bit stops the run.

verl's own trainer method runs with the hook; queue and actor are stand-ins.
"""

import pytest
import torch

from jetrl_verl.algorithms.old_log_probs import (
    LogProbsDiffer,
    first_difference,
    install_in_trainer,
    rows_per_rank,
    rows_to_check,
)

LENGTHS = [(3, 5), (1, 2), (4, 1), (2, 7), (2, 4), (5, 3), (1, 6), (3, 2)]
"""Prompt and response tokens of each sequence."""


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def next_bits(value: torch.Tensor) -> torch.Tensor:
    """FP32 numbers with the last bit flipped."""
    return (value.view(torch.int32) ^ 1).view(torch.float32)


@pytest.mark.parametrize(("rows", "count"), [(8, 2), (7, 2), (5, 3), (6, 6), (12, 5), (9, 1)])
@pytest.mark.parametrize("start", [0, 1, 17])
def test_the_window_covers_every_position(rows, count, start):
    steps = range(start, start + -(-rows // count))
    windows = [rows_to_check([True] * rows, count, step) for step in steps]
    assert set().union(*windows) == set(range(rows))
    assert all(len(set(window)) == count and window == sorted(window) for window in windows)
    assert windows == [rows_to_check([True] * rows, count, step) for step in steps], "a resumed run checks the same"


def test_padding_is_chosen_only_if_sequences_are_too_few():
    real = [True, False, True, True, False, True]
    assert set().union(*(rows_to_check(real, 2, step) for step in range(2))) == {0, 2, 3, 5}
    assert rows_to_check(real, 5, 3) == [0, 1, 2, 3, 5]
    assert rows_to_check([False, False, True], 2, 9) == [0, 2]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (dict(log_prob_use_dynamic_bsz=False, log_prob_micro_batch_size_per_gpu=16), 16),
        (dict(log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=16384), 5),
        (dict(log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=1000), 1),
    ],
)
def test_the_micro_batch_size_is_that_of_the_skipped_forward(settings, rows):
    from omegaconf import OmegaConf

    assert rows_per_rank(OmegaConf.create({"prompt_length": 1024, "response_length": 2048, **settings})) == rows


def test_bits_are_compared_not_values():
    values = [torch.tensor([-0.5, float("nan"), 0.0]), torch.tensor([-1.0])]
    mask = jagged([torch.ones(3), torch.ones(1)])
    one = jagged(values)
    assert first_difference(one, jagged([row.clone() for row in values]), mask) is None
    signed = jagged([torch.tensor([-0.5, float("nan"), -0.0]), values[1]])
    assert first_difference(one, signed, mask)[:4] == (0, 2, 0.0, -0.0)
    assert first_difference(one, signed, jagged([torch.tensor([1.0, 1.0, 0.0]), torch.ones(1)])) is None
    with pytest.raises(ValueError, match="for \\[3, 1\\] response tokens"):
        first_difference(one, jagged([values[1], values[0]]), mask)
    with pytest.raises(ValueError, match=r"actor in float32, got torch\.float64"):
        first_difference(one, one.double(), mask)


class Run:
    """verl's trainer with a stand-in queue and an actor that returns the rollout's values."""

    ranks, micro_batch = 2, 2

    def __init__(self, trainer_module, monkeypatch, padding: tuple[int, ...] = ()) -> None:
        from omegaconf import OmegaConf
        from transfer_queue import KVBatchMeta

        generator = torch.Generator().manual_seed(0)
        self.keys = [f"prompt{row // 2}_{row % 2}_0" for row in range(len(LENGTHS))]
        self.rollout = [-torch.rand(response, generator=generator) for _, response in LENGTHS]
        self.actor = [values.clone() for values in self.rollout]
        self.ids = [torch.arange(sum(lengths)) + 100 * row for row, lengths in enumerate(LENGTHS)]
        self.masks = [torch.full((response,), int(row not in padding)) for row, (_, response) in enumerate(LENGTHS)]
        self.written: dict[str, torch.Tensor] = {}
        self.ran: list[list[int]] = []
        self.tags = [{"is_padding": row in padding} for row in range(len(LENGTHS))]
        monkeypatch.setattr(trainer_module.tq, "kv_batch_get", self.get)
        monkeypatch.setattr(trainer_module.tq, "kv_batch_put", self.put)
        abstract = {"on_step_end": None, "on_sample_end": None}
        self.trainer = object.__new__(type("Trainer", (trainer_module.PPOTrainer,), abstract))
        self.trainer.actor_rollout_wg = self
        self.world_size = self.ranks
        rollout = {
            "temperature": 0.7,
            "log_prob_use_dynamic_bsz": False,
            "log_prob_micro_batch_size_per_gpu": self.micro_batch,
        }
        self.trainer.config = OmegaConf.create(
            {
                "algorithm": {"rollout_correction": {"bypass_mode": True}},
                "actor_rollout_ref": {
                    "rollout": rollout,
                    "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
                },
            }
        )
        self.batch = KVBatchMeta(keys=self.keys, tags=self.tags, partition_id="train")

    def get(self, keys, partition_id, select_fields=None):
        from tensordict import NonTensorStack, TensorDict

        rows = [self.keys.index(key) for key in keys]
        fields = {
            "rollout_log_probs": [self.rollout[row] for row in rows],
            "response_mask": [self.masks[row] for row in rows],
            "responses": [self.ids[row][LENGTHS[row][0] :] for row in rows],
            "input_ids": [self.ids[row] for row in rows],
        }
        data = TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=len(rows))
        data["raw_prompt"] = NonTensorStack(*(f"text {row}" for row in rows))
        return data if select_fields is None else data.select(*select_fields)

    def put(self, keys, partition_id, fields):
        assert keys == self.keys, "a field that only some sequences have would break the update"
        self.written.update(fields.items())
        return self.batch

    def compute_log_prob(self, data):
        """The dispatch of verl's worker group: a part of the rows for each rank, one micro-batch each."""
        from tensordict import TensorDict
        from verl.protocol import BatchData
        from verl.utils import tensordict_utils as tu

        asked = {name: tu.get(data, name) for name in ("calculate_entropy", "compute_loss", "temperature")}
        assert asked == {"calculate_entropy": True, "compute_loss": False, "temperature": 0.7}
        outputs = []
        for part in BatchData(data).chunk(self.ranks):
            rows = [int(ids[0]) // 100 for ids in part["input_ids"].unbind()]
            assert len(rows) == tu.get(part, "micro_batch_size_per_gpu") == self.micro_batch
            self.ran.append(rows)
            # An entry belongs to the token that follows it.
            log_probs, entropy = (
                [torch.cat([torch.zeros(LENGTHS[row][0] - 1), values[row], torch.zeros(1)]) for row in rows]
                for values in (self.actor, [2 - values for values in self.rollout])
            )
            fields = {"log_probs": jagged(log_probs), "entropy": jagged(entropy)}
            outputs.append(TensorDict(fields, batch_size=len(rows)))
        return tu.concat_tensordict(outputs)

    def step(self, number: int) -> dict[str, float]:
        self.trainer.global_steps = number
        metrics: dict[str, float] = {}
        assert self.trainer._compute_old_log_prob(self.batch, metrics) is self.batch
        return metrics


@pytest.fixture
def run(own_trainer, monkeypatch):
    install_in_trainer()
    return lambda **options: Run(own_trainer, monkeypatch, **options)


def test_old_log_probs_are_the_rollouts_and_each_rank_runs_one_micro_batch(run):
    job = run()
    metrics = job.step(1)
    assert set(job.written) == {"old_log_probs"}
    assert torch.equal(job.written["old_log_probs"].values(), torch.cat(job.rollout))
    assert job.ran == [[4, 5], [6, 7]]
    assert metrics["training/old_log_probs_checked_sequences"] == 4
    assert metrics["training/old_log_probs_checked_tokens"] == 4 + 3 + 6 + 2
    job.step(2)
    assert job.ran[2:] == [[0, 1], [2, 3]]


def test_entropy_and_mismatch_are_those_of_the_checked_sequences(run):
    job = run()
    metrics = job.step(1)
    entropy = torch.cat([2 - job.rollout[row] for row in range(4, 8)]).mean()
    assert metrics["actor/entropy"] == pytest.approx(entropy.item())
    for name in ("rollout_corr/k3_kl", "rollout_corr/kl", "rollout_corr/log_ppl_abs_diff"):
        assert metrics[name] == 0.0
    assert metrics["training/rollout_probs_diff_max"] == 0.0 and metrics["training/rollout_probs_diff_valid"] == 1
    ppl = torch.stack([(-job.rollout[row].mean()).exp() for row in range(4, 8)]).mean()
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(ppl.item())


@pytest.mark.parametrize(("row", "token"), [(4, 0), (5, 2), (7, 1)])
def test_a_difference_in_the_last_bit_of_one_checked_token_stops_the_run(run, row, token):
    job = run()
    job.actor[row][token] = next_bits(job.actor[row][token])
    with pytest.raises(LogProbsDiffer) as stopped:
        job.step(1)
    message = str(stopped.value)
    rollout, actor = (f"{v[row][token].view(torch.int32).item() & 0xFFFFFFFF:#010x}" for v in (job.rollout, job.actor))
    assert message.startswith(
        f"jetrl.old_log_probs=rollout: in step 1 the log-probability of response token {token} (id "
        f"{int(job.ids[row][LENGTHS[row][0] + token])}) of sequence {job.keys[row]}, position {row} of the batch, is "
    )
    assert f"({rollout}) in the rollout" in message and f"({actor}) in the actor's forward; 1 of 15 checked" in message
    assert message.endswith("to find the operation that differs.") and "Set jetrl.old_log_probs=compute" in message


def test_a_difference_outside_the_window_is_detected_in_a_later_step(run):
    job = run()
    job.actor[2][0] = next_bits(job.actor[2][0])
    job.step(1)
    with pytest.raises(LogProbsDiffer, match="in step 2 .* token 0 .* of sequence prompt1_0_0, position 2 of"):
        job.step(2)


def test_tokens_that_the_policy_did_not_sample_are_not_compared(run):
    job = run()
    job.masks[4] = torch.tensor([1, 0, 0, 1])
    job.actor[4][1] = -9.0
    assert job.step(1)["training/old_log_probs_checked_tokens"] == 2 + 3 + 6 + 2


def test_a_batch_of_padding_reports_counts_only(run):
    job = run(padding=tuple(range(8)))
    metrics = job.step(1)
    assert metrics == {"training/old_log_probs_checked_sequences": 4, "training/old_log_probs_checked_tokens": 0}


def test_without_the_option_verls_method_is_unchanged(own_trainer, monkeypatch):
    job = Run(own_trainer, monkeypatch)
    assert job.step(1) == {} and not job.ran

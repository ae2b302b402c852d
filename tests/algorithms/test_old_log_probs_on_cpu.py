# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which sequences a step compares, and that a difference in one bit stops an exact run and warns under ``jet_fp8``.

verl's own trainer methods run with the hooks; queue and actor are stand-ins.
"""

import math
import pickle
import shlex

import pytest
import torch
from ray.exceptions import RayTaskError

from jetrl_verl.algorithms import old_log_probs
from jetrl_verl.algorithms.old_log_probs import (
    Difference,
    LogProbsDiffer,
    compare,
    install_in_trainer,
    rows_per_rank,
    rows_to_check,
)
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig

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
    data = {
        "prompts": jagged([torch.tensor([9]), torch.tensor([8])]),
        "response_mask": jagged([torch.ones(3), torch.ones(1)]),
    }
    data["responses"] = jagged([torch.tensor([5, 6, 7]), torch.tensor([5])])
    one = jagged(values)
    assert compare(one, jagged([row.clone() for row in values]), data) == (4, None)
    signed = jagged([torch.tensor([-0.5, float("nan"), -0.0]), values[1]])
    compared, difference = compare(one, signed, data)
    assert (compared, difference.differing, difference.prompt, difference.token) == (4, 1, [9], 2)
    masked = {**data, "response_mask": jagged([torch.tensor([1.0, 1.0, 0.0]), torch.ones(1)])}
    assert compare(one, signed, masked) == (3, None)
    with pytest.raises(ValueError, match="for \\[3, 1\\] response tokens"):
        compare(one, jagged([values[1], values[0]]), data)
    with pytest.raises(ValueError, match=r"trainer in float32, got torch\.float64"):
        compare(one, one.double(), data)


class Run:
    """verl's trainer with a stand-in queue and an actor that returns the rollout's values.

    Args:
        source: ``jetrl.old_log_probs``. padding: rows without a sampled token. images: whether samples may have some.
    """

    ranks, micro_batch = 2, 2

    def __init__(
        self,
        trainer_module,
        monkeypatch,
        folder,
        source="rollout",
        precision="jet_fp8_exact",
        padding=(),
        images=False,
        mode="sync",
    ):
        from omegaconf import OmegaConf
        from transfer_queue import KVBatchMeta

        if precision:
            options = JetConfig(precision, "fp8", "fp8", operations="shared", old_log_probs=source, kv_cache="fp8")
            install_in_trainer(Job(options, images=images))
        generator = torch.Generator().manual_seed(0)
        self.keys = [f"prompt{row // 2}_{row % 2}_0" for row in range(len(LENGTHS))]
        self.rollout = [-torch.rand(response, generator=generator) for _, response in LENGTHS]
        self.actor = [values.clone() for values in self.rollout]
        self.ids = [torch.arange(sum(lengths)) + 100 * row for row, lengths in enumerate(LENGTHS)]
        self.masks = [torch.full((response,), int(row not in padding)) for row, (_, response) in enumerate(LENGTHS)]
        self.written: dict[str, torch.Tensor] = {}
        self.ran: list[list[int]] = []
        self.saved: list[str] = []
        self.failure: Exception | None = None
        self.extra: list[dict] = [{} for _ in LENGTHS]
        self.tags = [{"is_padding": row in padding} for row in range(len(LENGTHS))]
        monkeypatch.setattr(trainer_module.tq, "kv_batch_get", self.get)
        monkeypatch.setattr(trainer_module.tq, "kv_batch_put", self.put)
        abstract = {"on_step_end": None, "on_sample_end": None}
        self.trainer = object.__new__(type("Trainer", (trainer_module.PPOTrainer,), abstract))
        self.trainer.actor_rollout_wg = self
        self.world_size = self.ranks
        rollout = {
            "temperature": 0.7,
            "calculate_log_probs": True,
            "log_prob_use_dynamic_bsz": False,
            "log_prob_micro_batch_size_per_gpu": self.micro_batch,
            "n": 1,
        }
        actor = {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "calculate_entropy": False}
        update = {"ppo_mini_batch_size": 8, "ppo_epochs": 1, "entropy_coeff": 0.0, "data_loader_seed": 1}
        self.trainer.config = OmegaConf.create(
            {
                "algorithm": {"rollout_correction": {"bypass_mode": source == "rollout"}},
                "actor_rollout_ref": {"rollout": rollout, "actor": {**actor, **update, "shuffle": False}},
                "trainer": {"default_local_dir": str(folder)},
            }
        )
        self.trainer.distillation_config, self.trainer.trainer_mode = None, mode
        self.batch = KVBatchMeta(keys=self.keys, tags=self.tags, partition_id="train")

    def get(self, keys, partition_id, select_fields=None):
        from tensordict import NonTensorStack, TensorDict

        rows = [self.keys.index(key) for key in keys]
        fields = {
            "rollout_log_probs": [self.rollout[row] for row in rows],
            "response_mask": [self.masks[row] for row in rows],
            "prompts": [self.ids[row][: LENGTHS[row][0]] for row in rows],
            "responses": [self.ids[row][LENGTHS[row][0] :] for row in rows],
            "input_ids": [self.ids[row] for row in rows],
        }
        data = TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=len(rows))
        for name, values in self.written.items():
            data[name] = jagged([values.unbind()[row] for row in rows])
        data["extra_fields"] = NonTensorStack(*(self.extra[row] for row in rows))
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

        if data is self.batch:  # verl's own forward of the whole batch, whose outputs stay in the queue
            self.ran.append(list(range(len(LENGTHS))))
            self.written |= self.outputs(range(len(LENGTHS)))
            return data
        asked = {name: tu.get(data, name) for name in ("calculate_entropy", "compute_loss", "temperature")}
        assert asked == {"calculate_entropy": True, "compute_loss": False, "temperature": 0.7}
        outputs = []
        for part in BatchData(data).chunk(self.ranks):
            rows = [int(ids[0]) // 100 for ids in part["input_ids"].unbind()]
            assert len(rows) == tu.get(part, "micro_batch_size_per_gpu") == self.micro_batch
            self.ran.append(rows)
            outputs.append(TensorDict(self.outputs(rows), batch_size=len(rows)))
        return tu.concat_tensordict(outputs)

    def outputs(self, rows):
        # An entry belongs to the token that follows it.
        log_probs, entropy = (
            [torch.cat([torch.zeros(LENGTHS[row][0] - 1), values[row], torch.zeros(1)]) for row in rows]
            for values in (self.actor, [2 - values for values in self.rollout])
        )
        return {"log_probs": jagged(log_probs), "entropy": jagged(entropy)}

    def update_actor(self, batch):
        raise self.failure

    def save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep):
        self.saved.append(local_path)

    def flip(self, row: int, token: int) -> None:
        self.actor[row][token] = next_bits(self.actor[row][token])

    def step(self, number: int) -> dict[str, float]:
        self.trainer.global_steps = number
        metrics: dict[str, float] = {}
        assert self.trainer._compute_old_log_prob(self.batch, metrics) is self.batch
        return metrics


CHECKED = "training/old_log_probs_checked"
DIFFERING = "training/old_log_probs_differing_tokens"


@pytest.fixture
def run(own_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr(old_log_probs, "_WARNED", [])
    return lambda *args, **options: Run(own_trainer, monkeypatch, tmp_path, *args, **options)


def test_old_log_probs_are_the_rollouts_and_each_rank_runs_one_micro_batch(run):
    job = run()
    metrics = job.step(1)
    assert set(job.written) == {"old_log_probs"}
    assert torch.equal(job.written["old_log_probs"].values(), torch.cat(job.rollout))
    assert job.ran == [[4, 5], [6, 7]]
    assert (metrics[f"{CHECKED}_sequences"], metrics[f"{CHECKED}_tokens"], metrics[DIFFERING]) == (4, 4 + 3 + 6 + 2, 0)
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


@pytest.mark.parametrize(("source", "row", "token"), [("rollout", 4, 0), ("rollout", 7, 1), ("compute", 1, 1)])
def test_a_difference_in_the_last_bit_of_one_compared_token_stops_the_run(run, tmp_path, source, row, token):
    (tmp_path / "global_step_7").mkdir()
    job = run(source)
    job.flip(row, token)
    with pytest.raises(LogProbsDiffer) as stopped:
        job.step(9)
    compared = {"compute": 30, "rollout": 15}[source]
    rollout, actor = (f"{v[row][token].view(torch.int32).item() & 0xFFFFFFFF:#010x}" for v in (job.rollout, job.actor))
    message, folder = str(stopped.value), tmp_path / "log_probs_differ_in_step_9"
    identity = int(job.ids[row][LENGTHS[row][0] + token])
    assert message.startswith(
        "precision=jet_fp8_exact: before the update of step 9, the log-probability of response token "
        f"{token} (id {identity}) is "
    )
    assert f"({rollout}) in the rollout" in message and f"({actor}) in the trainer (1 of {compared} comp" in message
    policy = folder / "stopped_policy" / "huggingface"
    assert job.saved == [str(policy.parent)]
    assert message.endswith(
        f"precision=jet_fp8 from its checkpoint of step 7 (trainer.resume_mode=auto), or from the saved weights "
        f"(actor_rollout_ref.model.path={policy})."
    )
    files = ["--sequence", str(folder / "sequence.json"), "--out", str(folder / "diff")]
    assert shlex.split(message.split("`")[1]) == ["jetrl", "diff", str(policy), *files]
    sequence = Difference.load(folder / "sequence.json")
    assert (sequence.prompt, sequence.response) == (
        job.ids[row][: LENGTHS[row][0]].tolist(),
        job.ids[row][LENGTHS[row][0] :].tolist(),
    )
    assert torch.equal(torch.tensor(sequence.rollout), job.rollout[row])
    assert torch.equal(torch.tensor(sequence.trainer), job.actor[row])
    assert (sequence.token, sequence.step, sequence.temperature) == (token, 9, 0.7)
    assert sequence.options == {"scale_rule": "fp32", "unfit_layers": "stop", "kv_cache": "fp8"}


def test_sequences_with_an_image_are_counted_apart(run, capsys, monkeypatch):
    job = run("compute", precision="jet_fp8", images=True)
    image = int(job.ids[4][0])
    monkeypatch.setattr(old_log_probs, "_placeholders", lambda processor: [image])
    job.trainer.processor = None
    job.flip(4, 0)
    job.flip(4, 2)
    metrics = job.step(1)
    of_images = [metrics[f"training/old_log_probs_{name}"] for name in ("image_sequences", "image_tokens")]
    assert of_images == [1, 4] and metrics["training/old_log_probs_differing_image_tokens"] == 2
    assert (metrics[f"{CHECKED}_sequences"], metrics[f"{CHECKED}_tokens"], metrics[DIFFERING]) == (7, 26, 0)
    assert "warning" not in capsys.readouterr().err
    job.flip(1, 1)
    assert job.step(2)[DIFFERING] == 1 and "warning" in capsys.readouterr().err


def test_the_sentence_comes_if_the_policy_cannot_be_saved(run, monkeypatch):
    job = run("compute")
    job.flip(0, 0)
    monkeypatch.setattr(job, "save_checkpoint", lambda *_: (_ for _ in ()).throw(OSError("no space")), raising=False)
    with pytest.raises(LogProbsDiffer, match="huggingface, which failed to be saved: no space"):
        job.step(1)


def test_an_update_that_met_a_difference_stops_as_the_other_comparisons(run):
    job = run()
    job.step(3)
    raised = LogProbsDiffer(Difference([1, 2], [3, 4], [1, 1], [-0.5, -1.0], [-0.5, -2.0], 1, 1, 30))
    job.failure = RayTaskError("update_actor", "", pickle.loads(pickle.dumps(raised))).as_instanceof_cause()
    with pytest.raises(LogProbsDiffer, match=r"before the update of step 3, .* token 1 \(id 4\) is -1 .* `jetrl diff "):
        job.trainer._update_actor(job.batch, {})
    job.failure = ValueError("another")
    with pytest.raises(ValueError, match="another"):
        job.trainer._update_actor(job.batch, {})


def test_jet_fp8_warns_once_and_counts_in_every_step(run, capsys):
    job = run("compute", "jet_fp8")
    job.flip(2, 0), job.flip(3, 4)
    for step in (1, 2):
        metrics = job.step(step)
        assert (metrics[DIFFERING], metrics[f"{CHECKED}_tokens"], metrics[f"{CHECKED}_sequences"]) == (2, 30, 8)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "2 of 30 compared tokens differ" in warning and "Set precision=jet_fp8_exact" in warning
    assert not job.saved
    job.actor = [values.clone() for values in job.rollout]
    assert job.step(3)[DIFFERING] == 0


@pytest.mark.parametrize(
    ("tag", "compared"),
    [
        ({"min_global_steps": 4, "max_global_steps": 4}, 8),
        ({"min_global_steps": 3, "max_global_steps": 4}, 7),
        ({"min_global_steps": 5, "max_global_steps": 5}, 7),
        ({"is_padding": True}, 7),
    ],
    ids=["the last sync's", "begun before the sync", "read from a folder", "padding"],
)
def test_sequences_of_other_weights_are_not_compared(run, tag, compared):
    job = run("compute", "jet_fp8")
    job.batch.tags[2].update(tag)
    job.flip(2, 0)
    metrics = job.step(5)
    assert (metrics[f"{CHECKED}_sequences"], metrics[DIFFERING]) == (compared, compared - 7)
    job.trainer.local_trigger_step = 1  # an update has moved the weights since the sync
    assert DIFFERING not in job.step(5)


CURRENT, OLDER = {"min_global_steps": 4, "max_global_steps": 4}, {"min_global_steps": 3, "max_global_steps": 3}
RESUMED = {"min_global_steps": 2, "max_global_steps": 4}


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_tokens_are_compared_by_the_version_that_sampled_them(run, mode):
    """Sequence 2 has one token, 3 seven after a prompt of two: two of version 2, one of 3, four of 4."""
    job = run("compute", mode=mode)
    for row in range(len(LENGTHS)):
        job.batch.tags[row].update({2: OLDER, 3: RESUMED, 5: RESUMED}.get(row, CURRENT))
    job.extra[3] = {"token_versions": [[2, 2, 2], [4, 1, 3], [5, 4, 4]]}
    job.flip(2, 0)
    job.actor[3][:2] += 0.5
    job.actor[5][0] = -9.0  # of a resumed sequence whose agent loop kept no versions
    metrics = job.step(5)
    assert (metrics[f"{CHECKED}_tokens"], metrics[DIFFERING]) == (30 - 1 - 3 - 3, 0)
    assert metrics[f"{CHECKED}_sequences"] == 6
    lags = {lag: metrics[f"rollout_corr/lag_{lag}/tokens"] for lag in (0, 1, 2, "unknown")}
    assert lags == {0: 23, 1: 2, 2: 2, "unknown": 3}
    assert metrics["rollout_corr/lag_0/k3_kl"] == 0
    assert metrics["rollout_corr/lag_2/k3_kl"] == pytest.approx(math.expm1(0.5) - 0.5, rel=1e-5)

    job.trainer.local_trigger_step = 1  # of these trainers one restores the weights that sampled, the other has moved
    assert (DIFFERING in job.step(5)) == (mode == "separate_async")
    job.trainer.local_trigger_step = 0
    job.flip(3, 3)
    with pytest.raises(LogProbsDiffer, match=r"response token 3 .*\(1 of 23 compared tokens differ\)"):
        job.step(5)


def test_a_window_of_an_asynchronous_trainer_is_of_current_tokens(run):
    """Of the rollout's log-probabilities; sequence 3 is as above, 0 to 2 are of older weights."""
    job = run(mode="separate_async")
    for row in range(len(LENGTHS)):
        job.batch.tags[row].update([OLDER, OLDER, OLDER, RESUMED, *[CURRENT] * 4][row])
    job.extra[3] = {"token_versions": [[2, 2, 2], [4, 1, 3], [5, 4, 4]]}
    job.flip(3, 0)
    metrics = job.step(5)
    assert job.ran == [[3, 4], [5, 6]]
    assert (metrics[f"{CHECKED}_tokens"], metrics[DIFFERING]) == (4 + 4 + 3 + 6, 0)
    assert (metrics["rollout_corr/lag_0/tokens"], metrics["rollout_corr/lag_2/tokens"]) == (17, 2)
    of_actor = [row.tolist() for row in job.written[old_log_probs.SAMPLED_NOW].unbind()]
    assert of_actor[2:5] == [[0], [0, 0, 0, 1, 1, 1, 1], [1] * 4]

    job.trainer.local_trigger_step = 1  # the first update has moved the weights, and bypass mode restores none
    assert job.step(5) == {} and len(job.ran) == 2
    job.trainer.local_trigger_step = 0
    job.flip(3, 3)
    with pytest.raises(LogProbsDiffer, match=r"response token 3 .*\(1 of 17 compared tokens differ\)"):
        job.step(5)


def test_an_exact_run_stops_at_a_stale_sequence_that_its_support_did_not_refuse(run):
    job = run("compute")
    job.batch.tags[2].update(min_global_steps=3, max_global_steps=4)
    job.flip(2, 0)
    with pytest.raises(LogProbsDiffer):
        job.step(5)


def test_a_difference_outside_the_window_is_detected_in_a_later_step(run):
    job = run()
    job.flip(2, 0)
    job.step(1)
    with pytest.raises(LogProbsDiffer, match="before the update of step 2, .* token 0 "):
        job.step(2)


@pytest.mark.parametrize("source", ["rollout", "compute"])
def test_tokens_that_the_policy_did_not_sample_are_not_compared(run, source):
    job = run(source)
    job.masks[4] = torch.tensor([1, 0, 0, 1])
    job.actor[4][1] = -9.0
    assert job.step(1)[f"{CHECKED}_tokens"] == {"rollout": 15, "compute": 30}[source] - 2


def test_a_batch_of_padding_reports_counts_only(run):
    job = run(padding=tuple(range(8)))
    assert job.step(1) == {f"{CHECKED}_sequences": 4, f"{CHECKED}_tokens": 0, DIFFERING: 0}


def test_without_the_plugin_verls_method_is_unchanged(run):
    job = run(precision="")
    assert job.step(1) == {} and not job.ran

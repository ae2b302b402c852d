# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/evidence: the task's grading, outliers that change no bit, doses, verl's view of every arm, the tables."""

import json
from dataclasses import asdict

import pytest
import torch
from test_jobs_on_cpu import composed

from benchmarks.evidence import booking, picture, policy, run, task
from benchmarks.evidence.dose import Dose
from jetrl_verl.inputs import UserError
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.tools.demo import warmup
from jetrl_verl.tools.demo.policy import build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.task import compute_score


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model(tokenizer):
    model = build_model(policy.TINY.policy, tokenizer)
    policy.reserve(model)
    return model.to(torch.bfloat16)


def test_solutions_are_right_whatever_their_free_words_and_fit(tokenizer):
    problems = task.draw_problems("train", 8, (2, 5))
    for problem in problems:
        assert compute_score("", problem.solution, problem.answer)["score"] == 1
    prompt, response = task.token_limits((2, 5))
    ids, labels = warmup.encode(problems, tokenizer)
    judged = labels != warmup.IGNORED_LABEL
    assert judged.sum(1).max() <= response and (~judged & (ids != tokenizer.pad_token_id)).sum(1).max() <= prompt
    assert not (ids == tokenizer.unk_token_id).any()


def test_planted_outliers_change_fp8_alone(model, tokenizer):
    ids, labels = warmup.encode(task.draw_problems("train", 4, (2,)), tokenizer)

    def outputs(planted: float):
        if planted:
            policy.plant(model, planted)
        model.zero_grad()
        result = model(input_ids=ids, labels=labels)
        result.loss.backward()
        return [result.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    def in_fp8():
        fp8 = build_model(policy.TINY.policy, tokenizer).to(torch.bfloat16)
        fp8.load_state_dict(model.state_dict())
        replace_linears(fp8, plan_linears(fp8.config), scale_rule="fp32")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return fp8(input_ids=ids).logits

    plain, before = outputs(0), in_fp8()
    planted = outputs(2.0**16)
    assert all(map(torch.equal, plain, planted)), "every bit of the logits and of all gradients"
    error, coarse = (logits.sub(plain[0]).square().mean() for logits in (before, in_fp8()))
    assert coarse > 2 * error > 0


@pytest.mark.parametrize("stays", [False, True])
def test_a_dose_skips_first_and_last_sync_zeros_and_other_weights(stays):
    weights = {"norm": torch.ones(4), "linear": torch.tensor([[0.0, 1.0], [2.0, -1.0]])}
    dose = Dose(sigma=0.1, stays=stays, seed=3, last=3)
    syncs = [dict(dose.added(weights.items(), lambda name: name == "linear")) for _ in range(4)]
    noise = [sync["linear"] - weights["linear"] for sync in syncs]
    assert not noise[0].any() and not noise[3].any() and all(sync["norm"] is weights["norm"] for sync in syncs)
    assert noise[1].abs().max() > 0.01 and noise[1][0, 0] == 0 and torch.equal(noise[1], noise[2]) == stays


@pytest.mark.parametrize(("arm", "loss"), [*((arm, "grpo") for arm in run.ARMS), ("jet_fp8", "reinforce")])
def test_verl_accepts_every_run(arm, loss, model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    trial = run.Trial.parse(f"{arm}:{loss}:3")
    config = composed(run.words_of(trial, run.Sizes(), (2,), tmp_path, tmp_path / "policy", "cuda"))
    assert config.data.seed == 3 and config.actor_rollout_ref.actor.ppo_mini_batch_size == 8


def test_tables_of_results(tmp_path):
    """Of two seeds: jet_fp8 gains, a dose collapses after 30 of 40 rollouts."""
    (tmp_path / "results").mkdir()
    for arm, k3_kl, scores in (("jet_fp8", 0.0, [0.5] * 40), ("jet_fp8@0.1", 0.01, [0.5] * 25 + [0.0] * 15)):
        for seed in (1, 2):
            lines = [
                {"arm": arm, "loss": "grpo", "seed": seed, "rollouts": 40, "updates": 2, "status": 0},
                {"step": 0, "accuracy": 0.4},
            ]
            lines += [{"step": i + 1, "score": score, "k3_kl": k3_kl} for i, score in enumerate(scores)]
            lines[-1]["accuracy"] = scores[-1] + seed / 100
            (tmp_path / "results" / f"{arm}-{seed}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    groups = picture.read_all([tmp_path])
    text = picture.tables(groups)
    assert "| grpo | jet_fp8@0.1 | 2 | 1.0e-02 | 40.0% | -38.5 ± 3.1 | **-50.0 ± 4.4** | 62, 62 |" in text
    picture.draw(groups, tmp_path / "evidence.png")
    assert (tmp_path / "evidence.png").stat().st_size


def test_runs_begin_from_a_policy_of_their_size_alone(tmp_path):
    with pytest.raises(UserError, match="has no policy"):
        run.trials_of(["bf16:grpo:1"], tmp_path, tiny=True)
    (tmp_path / "facts.json").write_text(json.dumps({"size": asdict(policy.TINY)}))
    assert len(run.trials_of(["bf16:grpo:1"], tmp_path, tiny=True)) == 1
    with pytest.raises(UserError, match="a policy of another size or warm-up"):
        run.trials_of(["bf16:grpo:1"], tmp_path, tiny=False)


def test_a_booking_takes_what_does_not_count_and_begins_failures_again(tmp_path, monkeypatch):
    """With 10 rollouts a run: cut after 8 counts, cut after 7 does not, one that fails at its start has a second go."""
    runs = [run.Trial.parse(text) for text in booking.PROTOCOL[:3]]
    assert len(booking.PROTOCOL) == len(set(booking.PROTOCOL)) == 66 and all(map(run.Trial.parse, booking.PROTOCOL))
    (tmp_path / "results").mkdir()
    started = []

    def leave(trial, status, rollouts):
        first = {"arm": trial.arm, "loss": trial.loss, "seed": trial.seed, "rollouts": 10, "updates": 4}
        lines = [first | {"status": status}, *({"step": i + 1, "score": 0.5, "k3_kl": 0.0} for i in range(rollouts))]
        trial.results(tmp_path).write_text("\n".join(map(json.dumps, lines)))

    class Started:
        def __init__(self, command, env, cwd):
            trial = run.Trial.parse(command[6])
            started.append((str(trial), env["CUDA_VISIBLE_DEVICES"]))
            self.returncode = int(len(started) == 1)
            leave(trial, self.returncode, 0 if self.returncode else 10)

        def poll(self):
            return self.returncode

    leave(runs[0], 124, 8)
    leave(runs[1], 124, 7)
    assert booking.missing(runs, tmp_path) == runs[1:]
    options = run.parser_of_runs("").parse_args([str(tmp_path), "--rollouts", "10"])
    booking.check_results(runs, tmp_path, options)
    with pytest.raises(UserError, match=r"would count: \S+jsonl \(rollouts 10\), \S+jsonl \(rollouts 10\)\. Move"):
        booking.check_results(runs, tmp_path, run.parser_of_runs("").parse_args([str(tmp_path)]))
    monkeypatch.setattr(booking.subprocess, "Popen", Started)
    monkeypatch.setattr(booking.time, "sleep", lambda seconds: None)
    booking.take_all(runs[1:], tmp_path, ["0", "1"], 1, float("inf"), [])
    assert started == [(str(runs[1]), "0"), (str(runs[2]), "1"), (str(runs[1]), "0")]
    assert not booking.missing(runs, tmp_path)


def test_a_run_that_a_machine_takes_along_has_left_its_lines(model, tokenizer, tmp_path, monkeypatch):
    save_policy(model, tokenizer, tmp_path / "policy")
    trial = run.Trial.parse("bf16:grpo:1")
    step = {"critic/score/mean": 0.5, "rollout_corr/k3_kl": 1e-5}

    def run_verl(words, environment, log, ends, look):
        log.with_name("metrics.jsonl").write_text("")
        look()
        log.with_name("metrics.jsonl").write_text(json.dumps({"step": 1, "data": step}) + "\n")
        look()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_verl", run_verl)
    with pytest.raises(KeyboardInterrupt):
        run.take(trial, tmp_path, 0, True, run.TINY_RUN, 0.0)
    result = picture.result_of(trial.results(tmp_path))
    assert result.updates == run.TINY_RUN.updates and not result.counts

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study: its task against an evaluator of its own, its splits, runs, warm-up, resuming, verdicts and page."""

import ast
import json
import operator
import os
import random
import sys
from dataclasses import replace

import pytest
import torch
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from study_cases import FAKE, RUNS, SMALL, judge_that, save, train
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks.study import bf16_metrics, evaluate, plot, task, warm_up, window
from benchmarks.study import run as study
from benchmarks.study.plot import Noise
from benchmarks.study.warm_up import StudyConfig, StudyError, WarmUp
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools import launch
from jetrl_verl.tools.compare import CompareError
from jetrl_verl.tools.compare.table import Accuracy
from jetrl_verl.tools.demo.policy import build_model, build_tokenizer, load_policy, save_policy
from jetrl_verl.tools.demo.task import compute_score
from jetrl_verl.tools.demo.warmup import encode

LEVELS = StudyConfig().levels

# --- task ------------------------------------------------------------------------------------------------------------


def value_of(expression: str, variables: dict[str, int]) -> int:
    """An expression of names, whole numbers, +, - and *, by Python's own parser."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def walk(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](walk(node.left), walk(node.right))
        return variables[node.id] if isinstance(node, ast.Name) else node.value

    return walk(ast.parse(expression, mode="eval").body)


@pytest.mark.parametrize("level", (1, 2, *LEVELS, task.MAX_LEVEL))
def test_every_line_and_the_answer_are_what_the_prompt_says(level):
    stream = random.Random(level)
    for _ in range(50):
        problem = task.draw(stream, level)
        *statements, question = problem.prompt.split(";")
        variables: dict[str, int] = {}
        for statement in statements:
            name, expression = statement.split("=")
            assert name not in variables
            variables[name] = value_of(expression, variables) % 97
        assert len(statements) == level + 1 and question == f"{name}?"

        *lines, last = problem.solution.split("\n")
        assert len(lines) == level
        for name, line in zip(list(variables)[1:], lines):
            expression, plain, value = line.split("=")
            assert value_of(expression, {}) == int(plain)
            assert int(value) == int(plain) % 97 == variables[name]
        assert last == f"#### {problem.answer}" and int(problem.answer) == variables[question[0]]


def test_the_reward_wants_the_last_value_and_nothing_else():
    problem = task.draw(random.Random(1), 6)
    wrong = str((int(problem.answer) + 1) % 97)
    for response, score in (
        (problem.solution, 1.0),
        (f"#### {problem.answer}", 1.0),
        (problem.solution.replace(f"#### {problem.answer}", f"#### {wrong}"), 0.0),
        (problem.solution.replace("####", ""), 0.0),
        (problem.solution[:-20], 0.0),
    ):
        assert compute_score(task.DATA_SOURCE, response, problem.answer)["score"] == score


def test_no_problem_is_in_two_splits_whatever_the_seed():
    """A split is a property of the prompt: the same prompt, drawn by anybody, is in the same one."""
    for split in task.SPLITS:
        drawn = [problem for seed in range(3) for problem in task.problems(split, 60, LEVELS, seed)]
        assert {task.split_of(task.Problem(p.first, p.assignments)) for p in drawn} == {split}
    stream = random.Random(0)
    shares = [task.split_of(task.draw(stream, 3)) for _ in range(2000)]
    for split, share in task.SPLITS.items():
        assert abs(shares.count(split) / 2000 - share / sum(task.SPLITS.values())) < 0.04


def test_a_seed_gives_the_same_problems_and_levels_in_turn():
    first, again, another = (task.problems("test", 9, LEVELS, seed) for seed in (3, 3, 4))
    assert first == again != another
    assert [problem.level for problem in first] == [*LEVELS, *LEVELS, LEVELS[0]]
    with pytest.raises(ValueError, match="level 26 is not supported. Set 1 to 25"):
        task.draw(random.Random(0), task.MAX_LEVEL + 1)


def test_the_longest_problems_fit_the_limits_of_tokens():
    tokenizer = build_tokenizer()
    longest = task.Problem(("a", 96), tuple((chr(98 + i), "*", 96) for i in range(24)))
    wordy = task.problems("warmup", 100, (24,), 0)
    limits = task.token_limits(LEVELS)
    for problem in (longest, *wordy):
        ids, labels = encode([problem], tokenizer)
        response = int((labels >= 0).sum())
        assert ids.shape[1] - response <= limits[0] and response <= limits[1]
    assert sum(limits) <= StudyConfig().policy.max_positions
    assert limits[1] < 1.2 * max(int((encode([p], tokenizer)[1] >= 0).sum()) for p in wordy)


# --- policy and warm-up ----------------------------------------------------------------------------------------------


def test_the_policy_can_be_carried_and_every_linear_is_quantized():
    with torch.device("meta"):
        model = build_model(StudyConfig().policy, build_tokenizer())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 25e6 < parameters < 60 * 2**20 / 2
    assert all(plan.quantized for plan in plan_linears(model.config.to_dict(), 1).values())


def test_a_warm_up_lowers_the_loss_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    uninterrupted = WarmUp(SMALL, "cpu")
    whole = list(uninterrupted.train(12))
    first = WarmUp(SMALL, "cpu")
    losses = list(first.train(6))
    first.save(tmp_path / "warm_up.pt")
    second = WarmUp(SMALL, "cpu")
    second.load(tmp_path / "warm_up.pt")
    assert losses + list(second.train(12)) == whole
    assert whole[-1] < 0.8 * whole[0]
    policy, last = uninterrupted.policy().state_dict(), uninterrupted.model.state_dict()
    for name, weights in second.policy().state_dict().items():
        assert weights.dtype == torch.bfloat16 and torch.equal(weights, policy[name])
    # A decay of 0.9 over 12 steps: still nearer to where it began than the last step is.
    start = build_model(SMALL.policy, build_tokenizer()).lm_head.weight
    moved = [(state["lm_head.weight"].float() - start).norm() for state in (policy, last)]
    assert 0.2 * moved[1] < moved[0] < 0.8 * moved[1]
    with pytest.raises(StudyError, match="another configuration"):
        WarmUp(replace(SMALL, lr=1.0), "cpu").load(tmp_path / "warm_up.pt")


def test_what_is_measured_is_what_others_load(tmp_path):
    training = WarmUp(SMALL, "cpu")
    list(training.train(2))
    policy, ids = training.policy(), training._encoded[1][0]
    save_policy(training.policy(), training.tokenizer, tmp_path)
    loaded, _ = load_policy(tmp_path)
    assert policy.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, loaded(ids).logits)


def test_the_warm_up_samples_where_it_may_be_right_and_stops_when_it_is(tmp_path, monkeypatch, capsys):
    config = replace(SMALL, target=0.4, check_every=1, max_steps=40)
    whole = {8: 0.1, 9: 0.21, 10: 0.25, 11: 0.3}  # none before
    sampled = {9: 0.22, 10: 0.39, 11: 0.45}

    def count(self, steps):
        while self.step < steps:
            self.step += 1
            yield 1.0

    monkeypatch.setattr(WarmUp, "train", count)
    monkeypatch.setattr(WarmUp, "estimate", lambda self, policy: {1: 2 * whole.get(self.step, 0.0), 2: 0.0})
    monkeypatch.setattr(WarmUp, "accuracy", lambda self, policy: {1: sampled[self.step], 2: sampled[self.step]})
    monkeypatch.setattr(WarmUp, "save", lambda self, path: None)
    assert warm_up.train_until_right(WarmUp(config, "cpu"), tmp_path / "state")[1] == {1: 0.45, 2: 0.45}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and [i + 1 for i, line in enumerate(lines) if "accuracy" in line] == list(sampled)
    sampled.update(dict.fromkeys(range(41), 0.2))
    with pytest.raises(StudyError, match="did not reach an accuracy of 0.4 in 40 steps"):
        warm_up.train_until_right(WarmUp(config, "cpu"), tmp_path / "state")


def test_what_is_prepared_is_made_once(prepared, capsys):
    facts = warm_up.prepare(SMALL, prepared, "cpu")
    assert "is complete" in capsys.readouterr().out and 0 < facts["steps"] <= 12
    assert {path.name for path in prepared.iterdir()} == {
        "policy", "study.json", "test.parquet", "train.parquet", "validation.parquet"
    }  # fmt: skip
    with pytest.raises(StudyError, match="another configuration"):
        warm_up.prepare(replace(SMALL, lr=1.0), prepared, "cpu")
    with pytest.raises(StudyError, match="warm_up --out"):
        warm_up.read_facts(prepared / "nowhere")


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def composed(prepared, tmp_path_factory):
    """Callable ``(label, seed=1, words=()) -> DictConfig`` that verl composes for a run on a GPU."""
    with initialize_config_module("verl.trainer.config", version_base=None):

        def compose(label: str, seed: int = 1, words: tuple[str, ...] = ()):
            run = study.run_of(label, seed, tmp_path_factory.mktemp("out"))
            job = study.job_of(run, prepared, "cuda", study.read_study()["steps"], words, trainer=())
            return hydra_compose("ppo_trainer", job.command_of(run))

        yield compose


# The precision is all that sets the others apart (next test), and test_recipes_compose_on_cpu.py composes them all.
@pytest.mark.parametrize("label", ("bf16_lr_1_5", "jet_fp8_stock", "jet_fp8_exact", "jet_fp8_calibrated", "qurl_int8"))
def test_a_run_composes(composed, label):
    config = composed(label, 2)
    validate_config(config, need_reference_policy(config), use_critic=False)
    for node in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(node)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size / actor.ppo_mini_batch_size == 4
    assert config.data.train_batch_size * rollout.n / 4 == actor.ppo_micro_batch_size_per_gpu
    assert actor.optim.lr == pytest.approx(study.read_study()["learning_rate"] * (1.5 if "lr_1_5" in label else 1))
    assert config.data.seed == rollout.seed == actor.data_loader_seed == 2 and actor.shuffle
    assert config.data.val_files.endswith("validation.parquet") and config.data.train_files.endswith("train.parquet")
    assert config.trainer.resume_mode == "auto" and config.trainer.save_freq > 0
    precision = RUNS[label]["precision"]
    assert config.get("jetrl", {"precision": "bf16"})["precision"] == precision
    # The BF16 runs report what the others report.
    measured = actor.policy_loss["_target_"].endswith("MeasuredPolicyLossConfig")
    assert measured == (precision == "bf16")


def test_runs_differ_in_nothing_but_what_they_say(prepared, tmp_path):
    def said(label: str) -> set[str]:
        run = study.run_of(label, 1, tmp_path)
        words = study.job_of(run, prepared, "cuda", 80, (), trainer=()).command_of(run)
        own = {*RUNS[label].get("words", ()), f"precision={RUNS[label]['precision']}", "precision=bf16"}
        return {word.replace(run.name, "RUN") for word in words if word not in own}

    runs = {label: said(label) for label in RUNS}
    assert {label for label in RUNS if runs[label] != runs["bf16"]} == {"bf16_lr_1_5"}
    rates = runs["bf16"] ^ runs["bf16_lr_1_5"]
    assert {word.partition("=")[0] for word in rates} == {"actor_rollout_ref.actor.optim.lr"} and len(rates) == 2


def test_a_shared_gpu_gets_a_fixed_cache(composed):
    rollout = composed("jet_fp8", words=study.SHARED_GPU).actor_rollout_ref.rollout
    engine = omega_conf_to_dataclass(rollout).engine_kwargs["vllm"]
    assert engine["kv_cache_memory_bytes"] == 2 * 10**9 and rollout.gpu_memory_utilization == 0.1


def test_the_bf16_runs_metrics_are_put_in_where_a_worker_trains(monkeypatch):
    installed = []
    monkeypatch.setattr("jetrl_verl.metrics.hooks.install_in_actor", lambda: installed.append(1))
    monkeypatch.delenv("RANK", raising=False)
    bf16_metrics.MeasuredPolicyLossConfig()
    assert not installed
    monkeypatch.setenv("RANK", "0")
    assert bf16_metrics.MeasuredPolicyLossConfig().loss_mode == "vanilla" and installed


def test_an_unknown_run_is_one_sentence(tmp_path):
    with pytest.raises(StudyError, match="Choose one of bf16, "):
        study.run_of("bf32", 1, tmp_path)


# --- from a run to the page ------------------------------------------------------------------------------------------


def test_a_run_resumes_and_is_scored_and_the_page_says_what_it_is_worth(prepared, tmp_path):
    judge = (sys.executable, str(FAKE), "judge")
    with pytest.raises(StudyError, match="no score of bf16"):
        plot.write_study(tmp_path)
    assert train("bf16", 1, prepared, tmp_path, behaviour="die_once") == 1
    assert not evaluate.unscored(tmp_path)
    assert train("bf16", 1, prepared, tmp_path, behaviour="die_once") == 0
    metrics = (tmp_path / "runs/bf16-seed1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 2, 3, 4]
    with pytest.raises(CompareError, match="another command"):
        train("bf16", 1, prepared, tmp_path, "trainer.test_freq=1")
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge) == ["bf16-seed1"]

    # On another day, more runs; the first is not scored again.
    for label, seed in (("bf16", 2), ("jet_fp8", 1)):
        assert train(label, seed, prepared, tmp_path) == 0
    names = ["bf16-seed2", "jet_fp8-seed1"]
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge) == names
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge) == []
    before = evaluate.before_files(tmp_path / "evaluation")
    assert len(before) == 2

    page = plot.write_study(tmp_path)
    rows = {row["precision"]: row for row in json.loads((tmp_path / "study.json").read_text())["table"]}
    assert list(rows) == ["before training", "bf16", "jet_fp8", "between BF16's seeds"]
    assert rows["bf16"]["accuracy, T=1"].startswith("56.2%") and rows["bf16"]["seeds"] == "2"
    assert rows["jet_fp8"]["Δ to BF16, T=1"].startswith("+6.2")
    # Seed 1 is right on four problems of eight, seed 2 on five.
    assert rows["between BF16's seeds"]["accuracy, T=1"] == "12.5 points"
    assert rows["jet_fp8"]["verdict, T=1"] == "no verdict: BF16 learnt nothing"
    assert rows["jet_fp8"]["k3 KL"] == "2.0e-05" and rows["between BF16's seeds"]["reward"] == "0.010"
    for text in ("verdict, T=1", "<figure id='difference'><svg"):
        assert text in page.read_text()
    assert (tmp_path / "study_reward.png").is_file()
    logged = json.loads((tmp_path / "study.json").read_text())["runs"]["bf16-seed2"]
    # Rewards of steps 1 to 4 are 0.45 to 0.6 and 0.01 for each seed.
    assert logged["rollouts"] == 4 and logged["reward"] == pytest.approx(
        {"mean": 0.545, "smallest": 0.47, "largest": 0.62}
    )

    assert json.loads((tmp_path / "study.json").read_text())["pairs at temperature 1"] == {}, "none of them has scores"
    with pytest.raises(StudyError, match="has no score of bf16. Run .* with --rollouts 3"):
        plot.write_study(tmp_path, 3)

    scores = json.loads(before[0].read_text())
    before[0].write_text(json.dumps(scores | {"settings": scores["settings"] | {"samples": 2}}))
    with pytest.raises(StudyError, match="the same --samples"):
        plot.write_study(tmp_path)


def test_the_test_split_decides(prepared, tmp_path):
    assert train("bf16", 1, prepared, tmp_path) == 0
    run = study.run_of("bf16", 1, tmp_path)
    run.config.write_text(
        f"data: {{val_files: validation.parquet}}\nactor_rollout_ref: {{model: {{path: {prepared}/policy}}}}\n"
    )
    evaluate.write_config(run, tmp_path / "config.yaml", "cpu")
    assert f"val_files: {prepared}/test.parquet" in (tmp_path / "config.yaml").read_text()
    evaluate.write_config(run, tmp_path / "config.yaml", "cuda")
    assert f"kv_cache_memory_bytes: {evaluate.CACHE_BYTES}" in (tmp_path / "config.yaml").read_text()


def test_runs_that_ended_early_are_compared_at_one_length(prepared, tmp_path):
    judge = (sys.executable, str(FAKE), "judge")
    for label, seed in (("bf16", 1), ("bf16", 2), ("jet_fp8", 1)):
        assert train(label, seed, prepared, tmp_path) == 0
        if label == "bf16":
            save(study.run_of(label, seed, tmp_path), 2)
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge, rollouts=2) == ["bf16-seed1", "bf16-seed2"]
    assert not evaluate.unscored(tmp_path, 2) and len(evaluate.unscored(tmp_path)) == 3
    page = plot.write_study(tmp_path, 2)
    assert page.name == "study-2.html"
    rows = {row["precision"]: row for row in json.loads((tmp_path / "study-2.json").read_text())["table"]}
    assert list(rows) == ["before training", "bf16", "between BF16's seeds"]
    # Rewards of steps 1 and 2: 0.45 and 0.5, and a hundredth for each seed.
    assert rows["bf16"]["reward"] == "0.490"
    words = (tmp_path / "study-2.md").read_text()
    assert "weights after 2 rollouts" in words and "Without a score: fp8_rollout-seed1, " in words
    with pytest.raises(StudyError, match="with --rollouts 3"):
        plot.write_study(tmp_path, 3)
    # What an attempt that was stopped has not logged does not cost the score.
    (tmp_path / "runs/bf16-seed2/metrics.jsonl").write_text("")
    plot.write_study(tmp_path, 2)
    rows = {row["precision"]: row for row in json.loads((tmp_path / "study-2.json").read_text())["table"]}
    assert rows["bf16"]["seeds"] == "2" and rows["bf16"]["reward"] == "0.485"
    # Trained again, scored again.
    os.utime(tmp_path / "runs/bf16-seed1/checkpoints/global_step_2/data.pt", (2e9, 2e9))
    assert [run.name for run in evaluate.unscored(tmp_path, 2)] == ["bf16-seed1"]


def test_what_an_engine_scored_before_it_failed_is_kept(prepared, tmp_path):
    for label in ("bf16", "jet_fp8"):
        assert train(label, 1, prepared, tmp_path) == 0
    with pytest.raises(StudyError, match="status 3 before it scored jet_fp8-seed1"):
        evaluate.evaluate(tmp_path, 1, "cpu", judge_that("judge(names[:1], True); sys.exit(3)"))
    assert [run.name for run in evaluate.unscored(tmp_path)] == ["jet_fp8-seed1"]
    assert len(evaluate.before_files(tmp_path / "evaluation")) == 1
    assert not list((tmp_path / "evaluation").glob("new-*"))
    judge = (sys.executable, str(FAKE), "judge")
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge, names=["bf16-seed1"]) == []
    assert evaluate.evaluate(tmp_path, 1, "cpu", judge, names=["jet_fp8-seed1"]) == ["jet_fp8-seed1"]
    with pytest.raises(StudyError, match="bf32-seed1 is not a run"):
        evaluate.evaluate(tmp_path, 1, "cpu", judge, names=["bf32-seed1"])


def test_a_folder_without_runs_is_refused(tmp_path):
    sentence = f"{tmp_path}/runs has no runs. Train one with .* --out {tmp_path} --run bf16 --seed 1"
    with pytest.raises(StudyError, match=sentence):
        evaluate.evaluate(tmp_path, 1, "cpu", ("false",))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (warm_up, ()),
        (study, ("--run", "bf16", "--seed", "1")),
        (evaluate, ()),
        (window, ("--minutes", "60")),
    ],
)
def test_a_gpu_that_is_not_there_is_one_sentence(program, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["program", "--out", str(tmp_path / "out"), "--device", "cuda", *words])
    with pytest.raises(SystemExit, match="^error: no NVIDIA GPU answers; use --device cpu$"):
        program.main()
    assert not (tmp_path / "out").exists()


def test_the_warm_up_takes_the_device_that_is_there(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "detect_device", lambda: "cpu")
    monkeypatch.setattr(warm_up, "prepare", lambda config, out, device: seen.append(device))
    monkeypatch.setattr(sys, "argv", ["warm_up", "--out", str(tmp_path)])
    warm_up.main()
    assert seen == ["cpu"]


def accuracy(difference: float, error: float = 0.01) -> Accuracy:
    return Accuracy(0.5 + difference, 0.01, difference, error, None)


@pytest.mark.parametrize(
    ("noise", "difference", "seeds", "verdict"),
    [
        (Noise(0.01, 0.0, 0.2, 0.01, 0.6), 0.021, 2, "above BF16"),
        (Noise(0.01, 0.0, 0.2, 0.01, 0.6), -0.021, 2, "below BF16"),
        (Noise(0.01, 0.0, 0.2, 0.01, 0.6), -0.021, 1, "below BF16, one seed"),
        (Noise(0.01, 0.0, 0.2, 0.01, 0.6), 0.019, 2, "inside the noise"),  # two standard errors
        (Noise(0.03, 0.0, 0.2, 0.01, 0.6), 0.029, 2, "inside the noise"),  # BF16's seeds
        (Noise(0.01, 0.05, 0.2, 0.01, 0.6), 0.049, 2, "inside the noise"),  # the engine
        (Noise(0.03, 0.0, 0.2, 0.01, 0.6), 0.031, 2, "above BF16"),
        (Noise(None, 0.0, 0.2, 0.01, 0.6), 0.3, 2, "no verdict: BF16 needs two seeds"),
        (Noise(0.01, 0.0, 0.02, 0.01, 0.6), 0.3, 2, "no verdict: BF16 learnt nothing"),
        (Noise(0.01, 0.0, 0.2, 0.01, 0.91), -0.3, 2, "no verdict: the task is too easy"),
    ],
)
def test_the_rule_of_the_verdict(noise, difference, seeds, verdict):
    assert noise.verdict(accuracy(difference), seeds) == verdict

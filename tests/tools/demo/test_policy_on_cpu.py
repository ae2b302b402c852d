# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's policy, tokenizer and warm-up in transformers and verl's agent loop; its cache, overrides and baseline."""

import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module

from jetrl_verl.config.options import PRECISIONS
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools.demo import baseline, cache
from jetrl_verl.tools.demo.cache import Prepared, Recipe
from jetrl_verl.tools.demo.overrides import GROUP_SIZE, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, build_overrides
from jetrl_verl.tools.demo.policy import CHARACTERS, POLICIES, PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.task import Problem, TaskConfig, make_splits, write_parquet
from jetrl_verl.tools.demo.warmup import IGNORED_LABEL, WarmupConfig, encode, prompt_ids, solution_probability, warm_up
from jetrl_verl.tools.diff.run import engine_environment
from jetrl_verl.tools.launch import RunPaths

TINY = PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("text", [CHARACTERS, Problem(8737, 7219).solution, "user ####\n  two  spaces", ""])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_verl_builds_the_same_prompt(tokenizer):
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    problem = Problem(8737, 7219)
    turn = [{"role": "user", "content": problem.prompt}]
    assert QwenContinuousTokenBuilder(tokenizer).build_initial_tokens(turn) == prompt_ids(problem, tokenizer)


def test_every_problem_fits_the_token_budget(tokenizer):
    problem = Problem(999, 999)  # the longest sum; all prompts have one length
    assert len(prompt_ids(problem, tokenizer)) <= MAX_PROMPT_TOKENS
    assert len(tokenizer.encode(problem.solution)) + 1 <= MAX_RESPONSE_TOKENS


def test_a_hybrid_has_the_class_that_is_published_and_is_quantized_but_for_its_gates(tokenizer):
    model = build_model(POLICIES["hybrid"], tokenizer)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert {plan.kind for plan in plan_linears(model.config).values() if not plan.quantized} == {"ba"}


@pytest.mark.parametrize("wrong", [{"hidden_size": 192}, {"head_dim": 64}, {"intermediate_size": 0}])
def test_dimensions_off_the_fp8_block_are_refused(wrong):
    with pytest.raises(ValueError, match="multiple of 128"):
        PolicyConfig(**wrong)


def test_weights_depend_on_the_seed_and_keep_the_global_random_state(tokenizer):
    state = torch.get_rng_state()
    first, second = build_model(TINY, tokenizer), build_model(TINY, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_labels_cover_the_solution_and_the_end_of_turn_only(tokenizer):
    problems = [Problem(1000, 1000), Problem(9999, 9999)]  # answers of four and five digits: one row is padded
    ids, labels = encode(problems, tokenizer)
    for row, problem in enumerate(problems):
        labelled = labels[row][labels[row] != IGNORED_LABEL]
        assert tokenizer.decode(labelled) == problem.solution + "<|im_end|>"
        assert torch.equal(ids[row][labels[row] != IGNORED_LABEL], labelled)
    assert ids[0, -1] == tokenizer.pad_token_id and labels[0, -1] == IGNORED_LABEL


def test_solution_probability_of_a_uniform_model(tokenizer):
    model = build_model(TINY, tokenizer)
    torch.nn.init.zeros_(model.lm_head.weight)
    ids, labels = encode([Problem(1, 1)], tokenizer)
    tokens = int((labels != IGNORED_LABEL).sum())
    expected = float(len(tokenizer)) ** -tokens
    assert solution_probability(model, ids, labels) == pytest.approx(expected, rel=1e-3)


def test_warm_up_stops_at_its_target_and_repeats_by_seed(tokenizer):
    problems = make_splits(TaskConfig(digits=2, warmup=1000, train=1, test=1))["warmup"]
    config = WarmupConfig(target=1e-6, max_steps=400, batch_size=16, check_problems=32)
    first, second = (
        warm_up(build_model(TINY, tokenizer), tokenizer, problems, config, lambda line: None) for _ in range(2)
    )
    assert first["warmup_accuracy"] >= config.target and first["warmup_steps"] < config.max_steps
    assert all(first[name] == second[name] for name in ("warmup_steps", "warmup_accuracy"))


@pytest.mark.parametrize(
    ("precision", "device"), [*((precision, "cpu") for precision in PRECISIONS), ("jet_fp8", "cuda")]
)
def test_overrides_compose_with_verl(precision, device, tmp_path):
    folder = tmp_path / "it's a=b, [c]"  # characters that mean something in Hydra's grammar
    prepared = Prepared(folder, {})
    overrides = build_overrides(precision, prepared, RunPaths(folder), device, steps=4)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    assert config.data.val_files == str(prepared.test)
    assert config.actor_rollout_ref.model.path == str(prepared.policy)
    assert config.trainer.total_training_steps == 4
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 1.0
    assert config.get("jetrl", {"precision": "bf16"})["precision"] == precision
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert rollout.n == GROUP_SIZE
    # Two optimizer steps a batch, each in one micro batch.
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size
    assert actor.ppo_micro_batch_size_per_gpu == actor.ppo_mini_batch_size * rollout.n


@pytest.mark.timeout(600)
def test_the_engine_measures_one_policy_after_another(tmp_path):
    tokenizer = build_tokenizer()
    for seed in (1, 2):
        model = build_model(PolicyConfig(layers=1, seed=seed), tokenizer)
        # Far from uniform: with wrong weights the mismatch is large.
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
        save_policy(model, tokenizer, tmp_path / str(seed))
    write_parquet(make_splits(TaskConfig(warmup=1, train=1, test=8))["test"], "test", tmp_path / "test.parquet")
    policies = [(1, str(tmp_path / "1")), (5, str(tmp_path / "2")), (9, str(tmp_path / "1"))]
    out = tmp_path / "metrics.jsonl"
    request = baseline.BaselineRequest(policies, str(tmp_path / "test.parquet"), 8, 24, str(out))
    request.write(tmp_path / "request.json")
    command = [sys.executable, "-m", baseline.__name__, str(tmp_path / "request.json")]
    subprocess.run(command, check=True, env=engine_environment(cuda=False))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 5, 9]
    k3_kls = [record["data"][baseline.METRIC] for record in records]
    assert all(0 < k3_kl < 0.05 for k3_kl in k3_kls), k3_kls


RECIPE = Recipe(
    task=TaskConfig(digits=2, warmup=64, train=8, test=4),
    policy=PolicyConfig(hidden_size=128, layers=1, heads=1, intermediate_size=128),
    warmup=WarmupConfig(target=1e-40, max_steps=10, batch_size=8, check_problems=8),
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return folder, cache.make(RECIPE, folder, "cpu")


@pytest.mark.parametrize(
    "changed",
    [
        replace(RECIPE, task=replace(RECIPE.task, seed=8)),
        replace(RECIPE, policy=replace(RECIPE.policy, layers=2)),
        replace(RECIPE, warmup=replace(RECIPE.warmup, lr=1e-3)),
    ],
)
def test_every_setting_changes_the_key(changed):
    assert changed.key != RECIPE.key


def test_code_changes_the_key(monkeypatch, tmp_path):
    edited = tmp_path / "task.py"
    edited.write_text("# another version\n")
    before = RECIPE.key
    monkeypatch.setattr(cache.task, "__file__", str(edited))
    assert RECIPE.key != before


def test_an_entry_is_used_for_its_own_recipe_only(filled):
    folder, made = filled
    entry = cache.find(RECIPE, folder)
    assert entry == made and entry.facts["warmup_steps"] == RECIPE.warmup.check_every
    assert entry.train.is_file() and entry.test.is_file() and (entry.policy / "config.json").is_file()
    assert cache.find(replace(RECIPE, task=replace(RECIPE.task, seed=8)), folder) is None


def test_an_interrupted_warm_up_leaves_no_entry(filled, tmp_path, monkeypatch):
    folder, made = filled
    assert {path.name for path in folder.iterdir()} == {made.folder.name, cache.LOCK}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.warmup, "warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.make(RECIPE, tmp_path, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == [cache.LOCK]


def test_of_two_processes_one_warms_up_and_the_other_waits_for_its_entry(tmp_path, monkeypatch):
    entered, finish = threading.Event(), threading.Event()

    def fill(recipe, folder, device):
        assert not entered.is_set()
        entered.set()
        assert finish.wait(60)
        return {"warmup_steps": 7}

    said = queue.Queue()
    monkeypatch.setattr(cache, "_fill", fill)
    monkeypatch.setattr(cache, "say", said.put)
    with ThreadPoolExecutor() as both:  # an open file has the lock: threads exclude each other as processes
        first = both.submit(cache.make, RECIPE, tmp_path, "cpu")
        assert entered.wait(60)
        second = both.submit(cache.make, RECIPE, tmp_path, "cpu")
        assert "waiting for another process" in said.get(timeout=60)
        finish.set()
        assert first.result() == second.result() and first.result().facts == {"warmup_steps": 7}

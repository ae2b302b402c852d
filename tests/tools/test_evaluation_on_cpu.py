# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of ``jetrl compare``: problems and grades are the job's own, one engine loads the weights of all runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
import vllm_engine
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from jetrl_verl.inputs import UserError
from jetrl_verl.tools.compare import evaluate
from jetrl_verl.tools.compare.evaluate import Engine, Judge, Request, load_config
from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.task import TaskConfig, make_splits, write_parquet
from jetrl_verl.tools.demo.warmup import prompt_ids
from jetrl_verl.tools.launch import RunPaths

PROBLEMS = make_splits(TaskConfig(warmup=8, train=8, test=6))["test"]
SMALL = PolicyConfig(layers=1, heads=1, hidden_size=128, intermediate_size=128)


def save(folder: Path, seed: int, certainty: float = 1.0) -> Path:
    """A policy from ``seed``. Untrained ones are all nearly uniform, unless ``certainty`` multiplies their logits."""
    tokenizer = build_tokenizer()
    model = build_model(replace(SMALL, seed=seed), tokenizer)
    model.lm_head.weight.data *= certainty
    save_policy(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A run's composed configuration; policy and held-out problems are next to it."""
    folder = tmp_path_factory.mktemp("job")
    prepared = Prepared(folder, {})
    save(prepared.policy, seed=7)
    write_parquet(PROBLEMS, "test", prepared.test)
    overrides = build_overrides("jet_fp8", prepared, RunPaths(folder / "run"), "cpu", steps=2)
    with initialize_config_module("verl.trainer.config", version_base=None):
        OmegaConf.save(compose("ppo_trainer", overrides=overrides), folder / "config.yaml")
    return folder


@pytest.fixture(scope="module")
def judge(job) -> Judge:
    return Judge(load_config(job / "config.yaml"))


def tokens(judge: Judge, texts: list[str]) -> list[list[list[int]]]:
    end = judge.tokenizer.eos_token_id
    return [[[*judge.tokenizer.encode(text, add_special_tokens=False), end]] for text in texts]


def test_prompts_are_those_of_the_agent_loop(judge):
    assert judge.prompts == [prompt_ids(problem, judge.tokenizer) for problem in PROBLEMS]


def test_grades_are_those_of_the_jobs_reward_function(judge):
    right = [problem.solution for problem in PROBLEMS]
    assert judge.scores(tokens(judge, [*right[:3], "#### 1", "", "no"])) == [[1.0]] * 3 + [[0.0]] * 3
    ((right,),), ((wrong,),) = tokens(judge, right[:1]), tokens(judge, ["#### 7"])
    assert judge.scores([[wrong, right], [right, wrong]] + [[wrong, wrong]] * 4) == [[0, 1], [0, 0], *[[0, 0]] * 4]


def test_a_reward_without_accuracy_is_the_score(judge, monkeypatch):
    async def run_single(item):
        return {"reward_score": 0.25, "reward_extra_info": {}}

    monkeypatch.setattr(judge._manager, "run_single", run_single)
    assert judge.scores([[[1], [2]]]) == [[0.25, 0.25]]


def test_every_run_is_scored_on_the_same_subset_of_problems(job, tmp_path, monkeypatch):
    """verl draws it from the training's seed, and the file that is read may be that of any run."""
    prompt_lists = []
    monkeypatch.setattr(evaluate, "Engine", lambda config, prompts: prompt_lists.append(prompts))
    for seed in (1, 2, 3):
        config = load_config(job / "config.yaml")
        config.data.update({"seed": seed, "shuffle": True, "val_max_samples": 3})
        OmegaConf.save(config, tmp_path / "config.yaml")
        evaluate.evaluate(Request(str(tmp_path / "config.yaml"), {}, 0.0, 1))
    assert len(prompt_lists[0]) == 3 and prompt_lists[0] == prompt_lists[1] == prompt_lists[2]


def test_an_engine_has_the_jobs_prefix_cache_and_no_vision_tower(job, judge, monkeypatch):
    """A tower needs a processor, hence torchvision, which no other part of a job on text does."""
    engines = []
    monkeypatch.setattr("vllm.LLM", lambda *_, **arguments: engines.append(arguments))
    Engine(load_config(job / "config.yaml"), judge.prompts)
    assert engines[0]["language_model_only"] and engines[0]["enable_prefix_caching"]


@pytest.fixture(scope="module")
def engine(job, judge, cpu_platform):
    with vllm_engine.cpu_settings():
        yield Engine(load_config(job / "config.yaml"), judge.prompts)


def test_an_engine_loads_weights_in_place_and_equal_weights_give_equal_answers(engine, job, tmp_path):
    def answers() -> list:
        return [engine.answer(0.0, 1, seed=1), engine.answer(1.0, 2, seed=1)]

    first = answers()
    assert [[len(samples) for samples in way] for way in first] == [[1] * 6, [2] * 6]
    engine.load(save(tmp_path / "other", seed=8, certainty=100.0))
    second = answers()
    engine.load(job / "policy")
    assert answers() == first
    assert all(one != other for way in (0, 1) for one, other in zip(first[way], second[way]))


def test_every_policy_gets_a_file_and_no_weights_remain(engine, job, judge, tmp_path, monkeypatch):
    """The program end to end, on the engine that runs already and on checkpoints of Hugging Face's layout."""
    monkeypatch.setattr(evaluate, "Engine", lambda config, prompts: engine)
    monkeypatch.setattr(evaluate, "Judge", lambda config: judge)
    other = save(tmp_path / "jet", seed=8, certainty=100.0)
    checkpoints = {"before": None, "damaged": str(tmp_path), "bf16": str(job / "policy"), "jet_fp8": str(other)}
    out = tmp_path / "out"
    out.mkdir()
    policies = {name: (checkpoint, str(out / f"{name}.json")) for name, checkpoint in checkpoints.items()}
    request = Request(str(job / "config.yaml"), policies, 1.0, 2)
    (tmp_path / "request.json").write_text(json.dumps(vars(request)))
    graded = []
    monkeypatch.setattr(judge, "scores", lambda responses: graded.append(responses) or [[float(len(graded))]])
    with pytest.raises(UserError, match="^damaged could not be scored"):
        evaluate.main(str(tmp_path / "request.json"))
    assert graded[0] == graded[1] != graded[2]
    scores = {file.name: json.loads(file.read_text())["scores"] for file in out.iterdir()}
    assert scores == {"before.json": [[1.0]], "bf16.json": [[2.0]], "jet_fp8.json": [[3.0]]}

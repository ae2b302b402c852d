# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of ``jetrl compare``: problems and grades are the job's own, one engine takes the weights of all runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
import vllm_engine
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from jetrl_verl.tools.compare import CompareError, evaluate
from jetrl_verl.tools.compare.evaluate import BEFORE, Engine, Judge, Request, file_of, load_config
from jetrl_verl.tools.compare.run import SEED_KEYS, CompareRun, Job
from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.demo.overrides import build_overrides
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.task import TaskConfig, make_splits, write_parquet
from jetrl_verl.tools.demo.warmup import prompt_ids
from jetrl_verl.tools.launch import RunPaths

PROBLEMS = make_splits(TaskConfig(warmup=8, train=8, test=6))["test"]
SMALL = PolicyConfig(layers=1, heads=1, hidden_size=128, intermediate_size=128)


def save(folder: Path, seed: int, certainty: float = 1.0) -> Path:
    """A policy drawn from ``seed``; untrained ones are all nearly uniform, until their logits are multiplied."""
    tokenizer = build_tokenizer()
    model = build_model(replace(SMALL, seed=seed), tokenizer)
    model.lm_head.weight.data *= certainty
    save_policy(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A run's composed configuration; policy and held-out problems lie beside it."""
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


@pytest.mark.parametrize("precision", ["bf16", "jet_fp8"])
def test_the_words_of_a_run_compose_after_any_others(precision, tmp_path):
    """A script that chose a precision of its own, as recipes do, is overruled."""
    folder = tmp_path / "it's a=b, [c]"  # characters that mean something in Hydra's grammar
    words = Job(["precision=fp8_rollout", "data.seed=9"], {}).command_of(CompareRun(precision, 2, RunPaths(folder)))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    assert config.get("jetrl", {"precision": "bf16"})["precision"] == precision
    assert [OmegaConf.select(config, key) for key in SEED_KEYS] == [2, 2, 2]
    assert config.trainer.default_local_dir == str(folder / "checkpoints")
    for_workers = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)
    assert for_workers == {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}


def answers(judge: Judge, texts: list[str]) -> list[list[list[int]]]:
    end = judge.tokenizer.eos_token_id
    return [[[*judge.tokenizer.encode(text, add_special_tokens=False), end]] for text in texts]


def test_prompts_are_those_of_the_agent_loop(judge):
    assert judge.prompts == [prompt_ids(problem, judge.tokenizer) for problem in PROBLEMS]


def test_grades_are_those_of_the_jobs_reward_function(judge):
    right = [problem.solution for problem in PROBLEMS]
    assert judge.scores(answers(judge, right)) == [[1.0]] * 6
    assert judge.scores(answers(judge, [*right[:3], "#### 1", "", "no"])) == [[1.0]] * 3 + [[0.0]] * 3


def test_several_samples_stay_with_their_problem(judge):
    right, wrong = answers(judge, [PROBLEMS[0].solution])[0][0], answers(judge, ["#### 7"])[0][0]
    assert judge.scores([[wrong, right], [right, wrong]] + [[wrong, wrong]] * 4) == [[0, 1], [0, 0], *[[0, 0]] * 4]


def test_a_reward_without_accuracy_counts_as_it_is(judge, monkeypatch):
    async def run_single(item):
        return {"reward_score": 0.25, "reward_extra_info": {}}

    monkeypatch.setattr(judge._manager, "run_single", run_single)
    assert judge.scores([[[1], [2]]]) == [[0.25, 0.25]]


def test_a_job_with_a_reward_model_is_refused(job, tmp_path):
    config = OmegaConf.load(job / "config.yaml")
    config.reward.reward_model.enable = True
    OmegaConf.save(config, tmp_path / "config.yaml")
    with pytest.raises(CompareError, match="Set reward.custom_reward_function"):
        load_config(tmp_path / "config.yaml")


def test_a_subset_of_the_problems_is_the_same_for_every_run(job, tmp_path, monkeypatch):
    """verl draws it from the training's seed, and the file that is read may be that of any run."""
    asked = []

    class Deaf:
        def __init__(self, config, prompts):
            asked.append(prompts)

    monkeypatch.setattr(evaluate, "Engine", Deaf)
    whole, settings = load_config(job / "config.yaml"), []
    for seed in (1, 2, 3):
        config = whole.copy()
        config.data.update({"seed": seed, "shuffle": True, "val_max_samples": 3})
        file = tmp_path / f"{seed}.yaml"
        OmegaConf.save(config, file)
        request = Request(str(file), {}, False, (0.0,), 1, str(tmp_path))
        evaluate.evaluate(request)
        settings.append(request.settings(config))
    assert len(asked[0]) == 3 and asked[0] == asked[1] == asked[2]
    assert settings[0] == settings[1] and settings[0]["val_max_samples"] == 3
    assert {**request.settings(whole), "val_max_samples": 3} == settings[0] != request.settings(whole)


@pytest.fixture(scope="module")
def engine(job, judge, cpu_platform):
    with vllm_engine.cpu_settings():
        yield Engine(load_config(job / "config.yaml"), judge.prompts)


def test_an_engine_takes_weights_in_place_and_answers_alike_for_equal_ones(engine, job, judge, tmp_path):
    """The first weights, others, and the first again: sampled and greedy, equal in every token."""

    def ask() -> list:
        return [engine.answer(judge.prompts, temperature, 2, seed=1) for temperature in (0.0, 1.0)]

    other = save(tmp_path / "other", seed=8, certainty=100.0)
    first = ask()
    assert [len(samples) for samples in first[0]] == [1] * 6 and [len(samples) for samples in first[1]] == [2] * 6
    engine.load(other)
    second = ask()
    engine.load(job / "policy")
    assert ask() == first
    assert all(ours != theirs for way in (0, 1) for ours, theirs in zip(first[way], second[way]))


def test_every_run_gets_a_file_and_no_weights_stay(engine, job, judge, tmp_path, monkeypatch):
    """The program end to end, on the engine that runs already and on checkpoints of Hugging Face's layout."""
    monkeypatch.setattr(evaluate, "Engine", lambda config, prompts: engine)
    monkeypatch.setattr(evaluate, "Judge", lambda config: judge)
    solved = [answers(judge, [problem.solution for problem in PROBLEMS])]
    loaded = []
    stock = engine.load

    def load(folder: Path) -> None:
        loaded.append(sorted(path.name for path in folder.glob("*.safetensors")))
        stock(folder)

    def answer(prompts, temperature, samples, seed):
        return solved[0] if len(loaded) == 2 else Engine.answer(engine, prompts, temperature, samples, seed)

    monkeypatch.setattr(engine, "load", load)
    monkeypatch.setattr(engine, "answer", answer)
    checkpoints = {"bf16-seed1": str(job / "policy"), "jet_fp8-seed1": str(save(tmp_path / "jet", seed=8))}
    request = Request(str(job / "config.yaml"), checkpoints, True, (0.0, 1.0), 2, str(tmp_path / "out"))
    evaluate.write_request(request, tmp_path / "request.json")
    evaluate.main(str(tmp_path / "request.json"))

    assert loaded == [["model.safetensors"]] * 2
    found = {name: json.loads(file_of(request.out, name).read_text()) for name in (BEFORE, *checkpoints)}
    assert found["jet_fp8-seed1"]["scores"] == {"0.0": [[1.0]] * 6, "1.0": [[1.0]] * 6}
    assert (
        found[BEFORE]["scores"] == found["bf16-seed1"]["scores"] and found[BEFORE]["scores"]["1.0"] == [[0.0] * 2] * 6
    )
    assert all(entry["settings"] == request.settings(load_config(request.config)) for entry in found.values())
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json"}

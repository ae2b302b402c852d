# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each run of benchmarks/recipes.py: what its script then says to verl is a job that verl accepts, small ones too."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from recipe_cases import RECIPES
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from vllm import SamplingParams
from vllm.config import ModelConfig

from benchmarks import recipe_memory, recipes, verl_runs
from benchmarks.published_shapes import PUBLISHED, tiny, write_model
from benchmarks.verl_runs import Results
from jetrl_verl.tools.report import Run

BESIDE, WHOLE, TINY = "beside others", "whole", "tiny"
RUNS = [(*run, BESIDE) for run in recipes.chosen([])]
RUNS += [(name, "jet_fp8", way) for name in recipes.RECIPES for way in (WHOLE, TINY)]
CACHE = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"


@pytest.mark.parametrize(("name", "precision", "way"), RUNS)
def test_every_run_is_a_job_that_verl_accepts(words, tmp_path, name, precision, way):
    recipe, job = recipes.RECIPES[name], recipes.Job(tmp_path, way == TINY, whole=way == WHOLE)
    settings = {"PRECISION": precision, "GPUS_PER_NODE": "1", "MODEL_PATH": "/remote://policy", **recipe.settings}
    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = words(recipe.script, *job.words(name, precision), **settings)
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, need_reference_policy(config), use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert config.trainer.n_gpus_per_node == 1 and config.trainer.total_training_steps == recipes.STEPS
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    length = rollout.prompt_length + rollout.response_length
    assert actor.ppo_max_token_len_per_gpu >= length and rollout.max_num_batched_tokens > 0
    assert rollout.log_prob_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu, "what the plan counts"
    assert rollout.tensor_model_parallel_size == actor.ulysses_sequence_parallel_size == 1
    # Two updates a step, and groups whose answers can differ.
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size and rollout.n > 1
    goes_on = (name, precision) in {
        (other.continues, one) for other in recipes.RECIPES.values() for one in other.precisions
    }
    assert (config.trainer.save_freq > 0) == goes_on
    assert config.trainer.test_freq == recipes.STEPS
    moves = actor.fsdp_config.param_offload or actor.fsdp_config.optimizer_offload
    assert moves == (way == WHOLE and not name.startswith("deepscaler")) and rollout.enforce_eager == (way == TINY)
    # vLLM measures no memory where others change it meanwhile, and asks for little at its start.
    assert (OmegaConf.select(config, CACHE) is not None) == (way == BESIDE)
    assert (rollout.gpu_memory_utilization <= 0.05) == (way == BESIDE)


@pytest.fixture
def composed(words):
    """Callable: the config of a run of a job, after verl's checks."""

    def of(job: recipes.Job, name: str, precision: str):
        recipe = recipes.RECIPES[name]
        settings = {"PRECISION": precision, "GPUS_PER_NODE": str(job.gpus), "MODEL_PATH": "/remote://policy"}
        with initialize_config_module("verl.trainer.config", version_base=None):
            overrides = words(recipe.script, *job.words(name, precision), **settings, **recipe.settings)
            config = compose("ppo_trainer", overrides=overrides)
        validate_config(config, need_reference_policy(config), use_critic=False)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        return config

    return of


@pytest.fixture
def scripts_own(words):
    """Config of the script of gsm8k with nothing behind it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=words("gsm8k/run_qwen3_8b.sh", MODEL_PATH="/remote://policy"))


def test_on_eight_gpus_a_shipped_run_is_the_scripts_job(composed, scripts_own, tmp_path):
    """But for reward, validation, what is saved, and what is measured."""
    job = recipes.Job(tmp_path, False, gpus=8, steps=10, shipped=True)
    config = composed(job, "gsm8k", "jet_fp8")
    ships = recipes.RECIPES["gsm8k"].shipped
    assert ships == (
        scripts_own.data.train_batch_size,
        scripts_own.actor_rollout_ref.actor.ppo_mini_batch_size,
        scripts_own.actor_rollout_ref.rollout.n,
        scripts_own.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
    )
    for node in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model", "algorithm"):
        assert OmegaConf.select(config, node) == OmegaConf.select(scripts_own, node), node
    changed = {"val_kwargs", "calculate_log_probs"}
    rollout, own = config.actor_rollout_ref.rollout, scripts_own.actor_rollout_ref.rollout
    assert {key: value for key, value in rollout.items() if key not in changed} == {
        key: value for key, value in own.items() if key not in changed
    }
    data, own = dict(config.data), dict(scripts_own.data)
    assert data == own and config.trainer.total_training_steps == 10 and config.trainer.n_gpus_per_node == 8
    assert "1024 of the script's 1024 prompts on 8 of 8 GPUs, 36 of 36 layers" in job.said("gsm8k", "jet_fp8")


@pytest.mark.parametrize(("gpus", "prompts", "update", "bits"), [(4, 512, 128, 32), (2, 256, 64, 8)])
def test_on_fewer_gpus_batch_and_memory_are_smaller_and_it_is_said(composed, tmp_path, gpus, prompts, update, bits):
    job = recipes.Job(tmp_path, False, gpus=gpus, steps=10, shipped=True, gib=76.0)
    config = composed(job, "gsm8k", "bf16")
    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (prompts, update)
    assert actor.fsdp_config.param_offload and actor.ppo_max_token_len_per_gpu == 12288
    assert (actor.optim.optimizer == "AdamW8bit") == (bits == 8)
    assert f"{prompts} of the script's 1024 prompts on {gpus} of 8 GPUs" in job.said("gsm8k", "bf16")
    small = recipes.Job(tmp_path, False, gpus=gpus, shipped=True, prompts=64)
    assert small.batch(recipes.RECIPES["gsm8k"]) == (64, 16)
    larger = composed(replace(job, gib=136.0), "gsm8k", "bf16").actor_rollout_ref.actor
    assert not larger.fsdp_config.param_offload and larger.ppo_max_token_len_per_gpu == 24576


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_over_several_gpus_each_has_the_prompts_of_one(composed, tmp_path, name):
    one, two = recipes.Job(tmp_path, False), recipes.Job(tmp_path, False, gpus=2)
    config = composed(two, name, "jet_fp8")
    assert config.trainer.n_gpus_per_node == 2 and config.data.train_batch_size == 2 * recipes.RECIPES[name].prompts
    assert two.plan(recipes.RECIPES[name]).update < one.plan(recipes.RECIPES[name]).update
    assert not recipes.unfitting(two, [(name, "jet_fp8")])


def test_runs_of_other_gpus_steps_or_ways_have_other_names_and_files(tmp_path):
    jobs = [recipes.Job(tmp_path, False, gpus=gpus, steps=steps) for gpus in (1, 2) for steps in (3, 10)]
    jobs += [recipes.Job(tmp_path, False, whole=True), recipes.Job(tmp_path, False, shipped=True)]
    assert len({job.slug("gsm8k", "bf16") for job in jobs}) == len(jobs)
    assert len({tuple(job.name("gsm8k", "bf16").values()) for job in jobs[:4]}) == 4
    # A name says what was asked for, figures what was taken: neither hides the other in a record.
    figures = {*verl_runs.figures(Run("run", [(1, {"actor/grad_norm": 1.0})])), "status", "seconds", "words", "errors"}
    assert not figures & {*recipes.NAMES} and tuple(jobs[0].name("gsm8k", "bf16")) == recipes.NAMES


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("dapo_7b --shipped --gpus 8", "--shipped is not supported with dapo_7b"),
        ("gsm8k dapo_7b --shipped", "--shipped is not supported with dapo_7b"),
        ("gsm8k --shipped --gpus 16", "Set 8 or fewer."),
        ("gsm8k --shipped --whole", "Set one of them."),
        ("gsm8k --shipped --gpus 8 --prompts 4", "an update of 1 prompts is not supported with --gpus 8"),
        ("gsm8k --shipped --gpus 8 --at-once 2", "--at-once is not supported with --whole or --shipped"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(words, reason, tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipes.main([str(tmp_path / "out"), "--plan", *words.split()])
    assert reason in capsys.readouterr().err


def test_a_record_from_before_gpus_and_steps_were_written_down_is_read():
    file = Path(recipes.__file__).parent / "results" / "recipes_h200.json"
    held = json.loads(file.read_text())
    settings = {key: held[key] for key in ("tiny", "validates", "whole", "mean_response")}
    settings |= {"shipped": False, "prompts": None}
    results = Results(file, recipes.NAMES, settings, {"gpu": held["gpu"]}, recipes.BEFORE)
    assert len(results.runs) == len(held["runs"]) and all(
        (run["gpus"], run["of_steps"]) == (1, 3) for run in results.runs
    )


def test_a_plan_counts_what_a_run_then_takes():
    """Against the peak that verl logged on an H200, and with a cache that holds the longest response twice."""
    file = Path(recipes.__file__).parent / "results" / "verl_step_packed_4k_h200.json"
    (run,) = json.loads(file.read_text())["runs"]
    counted = recipe_memory.plan(run["model"], None, 16384, eight_bit=False)
    assert counted.update - counted.held == pytest.approx(run["peak_gib"], rel=0.03)
    for name, recipe in recipes.RECIPES.items():
        model = recipe_memory.sizes_of(recipe.model, recipe.layers)
        assert 2 * recipe.tokens * model.kv_bytes("bf16") < recipe_memory.CACHE, name


def test_three_of_most_recipes_share_one_h200():
    gib, peaks = 135.8, [recipes.Job(Path(), False).plan(recipe).peak for recipe in recipes.RECIPES.values()]
    assert all(peak < gib / 2 for peak in peaks) and sum(peak < gib / 3 for peak in peaks) >= 6


def test_without_validation_none_is_asked_for(tmp_path):
    job = recipes.Job(tmp_path, False, validates=False)
    assert "trainer.test_freq=-1" in job.words("gsm8k", "bf16")


def test_what_a_run_changes_is_said():
    said = recipes.Job(Path("/out"), False).said("dapo_7b", "jet_fp8")
    model = "8 of 28 layers of qwen2_5_7b, responses of about 512 tokens"
    assert said.startswith(f"dapo_7b ({model}, PRECISION=jet_fp8): ")
    for word in ("SP=1", "data.train_batch_size=4", "actor_rollout_ref.actor.optim.optimizer=AdamW8bit"):
        assert f" {word} " in said
    assert "(28 of 28 layers" in recipes.Job(Path("/out"), False, whole=True).said("dapo_7b", "jet_fp8")


def test_a_stage_whose_start_is_missing_is_a_failed_run_and_not_the_end(tmp_path):
    found = recipes.Job(tmp_path, True).take_steps("deepscaler_16k", "bf16")
    assert found == {"status": 1, "errors": ["deepscaler_8k:bf16 has not saved a policy"]}


def test_a_run_is_a_program_with_the_same_options(tmp_path):
    job = recipes.Job(tmp_path, True, validates=False, at_once=2)
    planned = job.planned("deepscaler_16k", "jet_fp8")
    assert planned.continues == {"recipe": "deepscaler_8k", "precision": "jet_fp8", "gpus": 1, "of_steps": 3}
    answer = subprocess.run([*planned.command, "60"], cwd=recipes.ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(planned.found.read_text())["errors"] == ["deepscaler_8k:jet_fp8 has not saved a policy"]


def test_responses_of_a_model_that_ends_them_end(tmp_path):
    """vLLM takes the list from the model's folder and stops at each of them; the prompt's own tokens are none."""
    published = tiny(PUBLISHED["qwen3_8b"])
    write_model(published, tmp_path, ends=64)
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 1 + published.words // 64
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "How many pens?"}], add_generation_prompt=True)
    assert ends[0] == tokenizer.eos_token_id and not set(ends[1:]) & {*prompt["input_ids"], tokenizer.pad_token_id}
    sampling = SamplingParams()
    sampling.update_from_generation_config(ModelConfig(str(tmp_path)).try_get_generation_config(), ends[0])
    assert set(sampling.stop_token_ids) == set(ends[1:])


def test_every_recipe_but_the_demo_and_32b_is_benchmarked():
    scripts = {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/run_*.sh")}
    left_out = {"dapo/run_qwen2_5_32b.sh"}
    assert {recipe.script for recipe in recipes.RECIPES.values()} == scripts - left_out


def test_the_command_line_names_runs_before_and_behind_its_options(tmp_path):
    script = Path(recipes.__file__).with_name("recipes_on_gpu.sh")
    environment = {**os.environ, "PYTHON": sys.executable}
    answer = subprocess.run(
        ["bash", str(script), str(tmp_path / "out"), "--tiny", "gsm8k:bf16", "--seconds", "0"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "gsm8k bf16 1 3: not begun, since the benchmark's time was up" in answer.stdout
    command = ["bash", str(script), str(tmp_path), "gsm9k"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 2 and "gsm9k is not a recipe here" in answer.stderr

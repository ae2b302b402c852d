# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each run of benchmarks/recipes.py: what its script then says to verl is a job that verl accepts, small ones too."""

import json
import os
import subprocess
import sys
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

from benchmarks import recipe_memory, recipes
from benchmarks.published_shapes import PUBLISHED, tiny, write_model

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
    assert planned.continues == {"recipe": "deepscaler_8k", "precision": "jet_fp8"}
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
    left_out = {"demo/run_addition.sh", "dapo/run_qwen2_5_32b.sh"}
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
    assert "gsm8k bf16: not begun, since the benchmark's time was up" in answer.stdout
    command = ["bash", str(script), str(tmp_path), "gsm9k"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 2 and "gsm9k is not a recipe here" in answer.stderr

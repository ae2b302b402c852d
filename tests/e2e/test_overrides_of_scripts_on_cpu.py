# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sets of overrides from verl's scripts that ``jet_fp8_exact`` accepts: a step of verl, without a mismatch; and two
steps of whole scripts with text.

A job runs five sets, harmless ones and others. ``JETRL_OVERRIDE_JOBS=6`` runs thirty; the default is one job.
"""

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hydra import initialize_config_module
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from verl_overrides import SCRIPTS, WITH_IMAGES, Draw, draws, driver_says, script_words, write_inputs

from jetrl_verl.tools.demo import task
from jetrl_verl.tools.demo.overrides import words_on_a_cpu
from jetrl_verl.tools.launch import VERL, RunPaths, build_environment, quote
from jetrl_verl.tools.process_tree import ProcessTree
from jetrl_verl.tools.report import MISMATCH, load_run

JOBS, SETS_A_JOB = int(os.environ.get("JETRL_OVERRIDE_JOBS", 1)), 5
MODEL = "actor_rollout_ref.model"
PRECISION = "precision=jet_fp8_exact"
FIRST = (
    "actor_rollout_ref.ref.strategy=fsdp2",  # FSDP1 offloads a reference to pinned memory, which needs a GPU driver
    f"reward.custom_reward_function.path={task.__file__}",
)
"""What a CPU and the demo's data need; a set may say otherwise."""

SIZES = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 24,
    "data.max_response_length": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.max_model_len": 64,
    "actor_rollout_ref.rollout.prompt_length": 24,
    "actor_rollout_ref.rollout.response_length": 16,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.data_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 1,
    "trainer.logger": "[console,file]",
    "trainer.resume_mode": "disable",
}
"""What a set may not choose: the sizes of a step that takes seconds, one device, and a metrics file."""


def words_of_sizes(steps: int) -> list[str]:
    """What replaces a whole script's sizes, and what needs a GPU driver or eight ranks."""
    sizes = SIZES | {"trainer.total_training_steps": steps, "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1}
    pinned = {f"actor_rollout_ref.{role}.fsdp_config.offload_policy": False for role in ("actor", "ref")}
    return [f"{key}={value}" for key, value in (sizes | pinned).items()]


FIXED = {*SIZES, *(word.lstrip("+").partition("=")[0] for word in words_on_a_cpu())}
NOT_HERE = (
    # A second model, another engine or its optimizer, a profiler, pinned memory and streams of a GPU.
    "algorithm.adv_estimator=gae",
    "reward.reward_model.enable=True",
    "model_engine=",
    "actor_rollout_ref.actor.model_engine=",
    "actor_rollout_ref.actor.optim.override_optimizer_config.",
    "actor_rollout_ref.actor.optim.lr_decay_style=",
    "actor_rollout_ref.actor.optim.min_lr=",
    "actor_rollout_ref.actor.policy_loss.tau_",
    "actor_rollout_ref.actor.profiler.enable=",
    "actor_rollout_ref.ref.profiler.enable=",
    "actor_rollout_ref.rollout.profiler.enable=",
    "global_profiler.steps=[",
    "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
    "actor_rollout_ref.ref.fsdp_config.offload_policy=True",
    "actor_rollout_ref.model.enable_activation_offload=",
    # Files of verl's repository or of a cluster.
    "data.custom_cls.",
    "reward.custom_reward_function.",
    "trainer.rollout_data_dir=",
)
"""Beginnings of words that stock verl cannot follow on one CPU."""


def settings(draw: Draw) -> dict[str, str]:
    """Keys of a set that a run here reads, and their values."""
    pairs = (word.lstrip("+").partition("=") for word in draw.words)
    return {key: value for key, _, value in pairs if key not in FIXED}


def joined_sets(inputs: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Words of ``SETS_A_JOB`` sets each that verl can follow here, set no key to two values, and pass the driver;
    harmless ones and others by turns, those with the most keys first.
    """
    sets = [draw for draw in draws() if not any(word.lstrip("+").startswith(NOT_HERE) for word in draw.words)]
    sets.sort(key=lambda draw: -len(settings(draw)))
    kinds = ([draw for draw in sets if draw.harmless == harmless] for harmless in (True, False))
    waiting = [draw for pair in zip(*kinds) for draw in pair]
    while True:
        words, chosen, taken = [], {}, []
        for draw in waiting:
            more = [*dict.fromkeys([*words, *draw.words])]
            agrees = all(chosen.get(key, value) == value for key, value in settings(draw).items())
            if agrees and not driver_says([PRECISION, *inputs, *more]):
                words, chosen, taken = more, chosen | settings(draw), [*taken, draw]
            if len(taken) == SETS_A_JOB:
                break
        waiting = [draw for draw in waiting if draw not in taken]
        yield tuple(words)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run(folder: Path, *words: str) -> list[float]:
    """The mismatch of each step of a job on this CPU."""
    paths = RunPaths(folder / "run")
    paths.folder.mkdir()
    places = [f"hydra.run.dir={quote(paths.folder)}", f"trainer.default_local_dir={quote(folder / 'checkpoints')}"]
    command = [*VERL, PRECISION, *words, *words_on_a_cpu(), *places]
    with ProcessTree(command, build_environment(paths, "cpu"), paths.log) as tree:
        while (status := tree.poll()) is None:
            time.sleep(0.5)
    assert status == 0, paths.log.read_text()[-4000:]
    return load_run(paths.folder).series(MISMATCH)[1]


@pytest.mark.parametrize("number", range(JOBS))
def test_accepted_sets_have_no_mismatch(number, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with initialize_config_module("verl.trainer.config", version_base=None):
        words = next(islice(joined_sets(inputs), number, None))
    print(*words)
    sizes = (f"{key}={value}" for key, value in SIZES.items())
    assert run(tmp_path, *inputs, "algorithm.adv_estimator=grpo", *FIRST, *words, *sizes) == [0.0]


def save_adapter(policy: Path, folder: Path) -> list[str]:
    """Save a random LoRA adapter of a saved policy; the words that train it."""
    adapter = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(policy), adapter).save_pretrained(folder)
    return [f"{MODEL}.lora_rank=16", f"{MODEL}.lora_adapter_path={folder}"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in WITH_IMAGES])
def test_scripts_take_two_steps_with_text(script, tmp_path):
    words = [*write_inputs(tmp_path / "inputs", SCRIPTS[script][0]), *FIRST, *words_of_sizes(2)]
    if script.endswith("_from_adapter_fsdp"):
        words += save_adapter(tmp_path / "inputs" / "policy", tmp_path / "adapter")
    words.append("actor_rollout_ref.actor.entropy_coeff=0.1")  # a random policy is hardly ever right
    assert run(tmp_path, *script_words(script), *words) == [0, 0]

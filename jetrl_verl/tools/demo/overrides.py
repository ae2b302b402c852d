# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's verl command line, for a CPU or one GPU. Only ``precision=...`` depends on the precision."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.demo import task
from jetrl_verl.tools.launch import RunPaths, quote

if TYPE_CHECKING:
    from jetrl_verl.tools.demo.cache import Prepared

# The longest prompt has 15 tokens, the longest worked solution 34.
MAX_PROMPT_TOKENS = 24
MAX_RESPONSE_TOKENS = 40

PROMPTS, GROUP_SIZE = 16, 8  # prompts of a step, responses to each
LEARNING_RATE = 2e-4

LOCAL_RAY = {
    "++ray_kwargs.ray_init.address": "local",  # never join a cluster that runs here
    "++ray_kwargs.ray_init.include_dashboard": False,
}
"""A Ray cluster for this job alone."""

FEW_PROCESSES = {
    "data.dataloader_num_workers": 0,
    "reward.num_workers": 1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    **LOCAL_RAY,
}
"""One process of each kind, for a job on one machine."""

CPU = {
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "++actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,
    "ray_kwargs.ray_init.num_cpus": 16,  # each actor claims one; they mostly wait
    "++ray_kwargs.ray_init.num_gpus": 1,
}
"""Settings of verl on a machine without a GPU."""


def words_on_a_cpu() -> list[str]:
    """Overrides that run a job for GPUs on a CPU."""
    return _words({**FEW_PROCESSES, **CPU})


def words_of_a_local_ray() -> list[str]:
    """Overrides that start a Ray cluster for this job alone."""
    return _words(LOCAL_RAY)


def build_overrides(precision: str, prepared: "Prepared", paths: RunPaths, device: str, steps: int) -> list[str]:
    """Hydra overrides for ``python -m verl.trainer.main_ppo``; ``device`` is ``cpu`` or ``cuda``."""
    sequences = PROMPTS * GROUP_SIZE
    common = {
        "precision": precision,
        # data
        "data.train_files": prepared.train,
        "data.val_files": prepared.test,
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": MAX_RESPONSE_TOKENS,
        "data.seed": 7,
        # reward and advantage
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": Path(task.__file__).resolve(),
        "reward.custom_reward_function.name": "compute_score",
        # model: packed sequences without flash-attn
        "actor_rollout_ref.model.path": prepared.policy,
        "++actor_rollout_ref.model.override_config.attn_implementation": JETRL_ATTENTION,
        # actor: two optimizer steps per batch, so that ratios leave 1 and tokens are clipped
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": sequences // 2,
        "actor_rollout_ref.actor.calculate_entropy": True,
        # rollout
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": GROUP_SIZE,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        # for the mismatch metrics; bf16 leaves verl's default
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.max_model_len": 2 * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": sequences,
        # validation samples as training does
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        # trainer
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": max(1, steps // 2),
        "trainer.resume_mode": "disable",
        "trainer.project_name": "jetrl-demo",
        "trainer.experiment_name": precision,
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": paths.folder / "checkpoints",
        "hydra.run.dir": paths.folder / "hydra",
    }
    on_device = {"cpu": CPU, "cuda": {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.3}}[device]
    return _words({**common, **FEW_PROCESSES, **on_device})


def _words(overrides: Mapping[str, object]) -> list[str]:
    return [f"{key}={quote(value)}" for key, value in overrides.items()]

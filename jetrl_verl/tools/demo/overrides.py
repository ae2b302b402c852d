# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's verl command line: which of verl's settings it changes, for the CPU and for one GPU, and why.

Nothing here is particular to a precision but the one word ``precision=...``. The optimization settings come from a
plain-torch GRPO loop on the same task and policy, one seed each: 32 prompts of 8 samples, two AdamW steps a batch and a
learning rate of 2e-4 took accuracy at temperature 1 from 0.45 to 0.82 in 30 steps. With one AdamW step a batch, 3e-4
reached 0.81 and 1e-3 lost all reward within four steps.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.demo import task
from jetrl_verl.tools.launch import RunPaths, quote

if TYPE_CHECKING:
    from jetrl_verl.tools.demo.cache import Prepared

# The longest prompt has 17 tokens and the longest worked solution 44, end of turn included.
MAX_PROMPT_TOKENS = 24
MAX_RESPONSE_TOKENS = 48

GROUP_SIZE = 8
LEARNING_RATE = 2e-4

LOCAL_RAY = {
    "++ray_kwargs.ray_init.address": "local",  # never join a cluster that happens to run here
    "++ray_kwargs.ray_init.include_dashboard": False,
}
"""A Ray cluster of the job's own, without what costs seconds at the start."""

FEW_PROCESSES = {
    "data.dataloader_num_workers": 0,
    "reward.num_workers": 1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    # one machine: a single storage actor, each process costs seconds at the start
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    **LOCAL_RAY,
}
"""What keeps a job of one machine small."""

CPU = {
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "++actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,
    "ray_kwargs.ray_init.num_cpus": 16,  # Ray's bookkeeping: each actor claims one, they mostly wait
    "++ray_kwargs.ray_init.num_gpus": 1,
}
"""What verl needs where there is no GPU."""


def words_on_a_cpu() -> list[str]:
    """Overrides with which a job that is written for GPUs runs on this machine's CPU, but for its sizes."""
    return _words({**FEW_PROCESSES, **CPU})


def words_of_a_local_ray() -> list[str]:
    """Overrides that start a Ray cluster for this job alone, and nothing else."""
    return _words(LOCAL_RAY)


def words_of_one_machine() -> list[str]:
    """Overrides that keep a job of one machine small: few processes beside those that compute."""
    return _words(FEW_PROCESSES)


def build_overrides(precision: str, prepared: "Prepared", paths: RunPaths, device: str, steps: int) -> list[str]:
    """Hydra overrides for ``python -m verl.trainer.main_ppo``.

    Args:
        precision: a choice of the Hydra group ``precision``.
        prepared: data and policy.
        paths: where the run writes.
        device: ``cpu`` or ``cuda``.
        steps: number of GRPO steps.
    """
    prompts = 32
    sequences = prompts * GROUP_SIZE
    common = {
        "precision": precision,
        # data
        "data.train_files": prepared.train,
        "data.val_files": prepared.test,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": MAX_RESPONSE_TOKENS,
        "data.seed": 7,
        # reward and advantage
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "reward.custom_reward_function.path": Path(task.__file__).resolve(),
        "reward.custom_reward_function.name": "compute_score",
        # model: packed sequences, verl's default, without flash-attn
        "actor_rollout_ref.model.path": prepared.policy,
        "actor_rollout_ref.model.use_remove_padding": True,
        "++actor_rollout_ref.model.override_config.attn_implementation": JETRL_ATTENTION,
        # actor: two optimizer steps a batch, so that ratios leave 1 and the clip fraction says something
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts // 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": sequences // 2,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.calculate_entropy": True,
        # rollout
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": GROUP_SIZE,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.load_format": "dummy",
        # what the mismatch metrics compare with; the precision groups set it too, bf16 leaves verl's default
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.max_model_len": 2 * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": sequences,
        # validation samples as training does: the accuracy then is the policy's, not its mode's
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        # trainer
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": True,
        "trainer.test_freq": min(10, steps),
        "trainer.save_freq": -1,
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

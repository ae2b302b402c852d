# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The demo's verl command line: which of verl's settings it changes, for the CPU and for one GPU, and why.

Nothing here is particular to a precision but the one word ``precision=...``. The optimisation settings come from a
plain-torch GRPO loop on the same task and policy, one seed each: 32 prompts of 8 samples, two AdamW steps a batch and a
learning rate of 2e-4 took accuracy at temperature 1 from 0.45 to 0.82 in 30 steps. With one AdamW step a batch, 3e-4
reached 0.81 and 1e-3 lost all reward within four steps.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from jetrl_verl.demo import task
from jetrl_verl.demo.cache import Prepared

# The longest prompt has 17 tokens and the longest worked solution 44, end of turn included.
MAX_PROMPT_TOKENS = 24
MAX_RESPONSE_TOKENS = 48

GROUP_SIZE = 8
LEARNING_RATE = 2e-4


@dataclass(frozen=True)
class RunPaths:
    """Files of one run below its own folder."""

    folder: Path

    log = property(lambda self: self.folder / "run.log")
    metrics = property(lambda self: self.folder / "metrics.jsonl")
    facts = property(lambda self: self.folder / "run.json")
    report = property(lambda self: self.folder / "report.html")
    config = property(lambda self: self.folder / "hydra" / ".hydra" / "config.yaml")
    ray_logs = property(lambda self: self.folder / "ray_logs")

    def operations(self) -> str:
        """``shared`` or ``stock``, what the run's composed config says of ``jetrl.operations``; needs ``config``."""
        # verl's dump is large, and only a run of ours has the node.
        node = yaml.safe_load(self.config.read_text()).get("jetrl")
        return node["operations"] if node else "stock"


def build_overrides(precision: str, prepared: Prepared, paths: RunPaths, device: str, steps: int) -> list[str]:
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
        "data.dataloader_num_workers": 0,
        # reward and advantage
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "reward.custom_reward_function.path": Path(task.__file__).resolve(),
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        # model: flash-attn is not required, and remove-padding needs it
        "actor_rollout_ref.model.path": prepared.policy,
        "actor_rollout_ref.model.use_remove_padding": False,
        "++actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        # actor: two optimiser steps a batch, so that ratios leave 1 and the clip fraction says something
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
        "actor_rollout_ref.rollout.agent.num_workers": 1,
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
        "trainer.v1.sampler.custom_sampler.path": Path(__file__).resolve().with_name("sampler.py"),
        "trainer.v1.sampler.custom_sampler.name": "AttentiveReplayBuffer",
        "trainer.default_local_dir": paths.folder / "checkpoints",
        "hydra.run.dir": paths.folder / "hydra",
        # one machine: a single storage actor and no dashboard, each process costs seconds at the start
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "++ray_kwargs.ray_init.address": "local",  # never join a cluster that happens to run here
        "++ray_kwargs.ray_init.include_dashboard": False,
    }
    on_device = {
        "cpu": {
            "actor_rollout_ref.actor.use_torch_compile": False,
            "actor_rollout_ref.rollout.enforce_eager": True,
            "actor_rollout_ref.rollout.free_cache_engine": False,
            "++actor_rollout_ref.rollout.enable_sleep_mode": False,
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,
            "ray_kwargs.ray_init.num_cpus": 16,  # Ray's bookkeeping: each actor claims one, they mostly wait
            "++ray_kwargs.ray_init.num_gpus": 1,
        },
        "cuda": {
            "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        },
    }[device]
    return [f"{key}={quote(value)}" for key, value in {**common, **on_device}.items()]


def build_environment(paths: RunPaths, device: str) -> dict[str, str]:
    """Environment of the trainer: this process's, verl's metrics file, no network, no telemetry."""
    environment = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # Before anything else Ray would start a worker for every core. verl's actors have an environment of their own,
        # so none of them is ever used: on 32 cores, with fourteen runs side by side, 448 processes.
        "RAY_prestart_worker_first_driver": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    if device == "cpu":
        environment |= {
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # One thread and two take the same 15 s a step on two cores: what the update gains (7.3 -> 6.1 s) the
            # rollout, where vLLM and the agent loop run side by side, loses (4.6 -> 6.4 s). One does not collapse when
            # something else runs, as waiting OpenMP threads do.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    return environment


def precision_word(words: Iterable[str]) -> str | None:
    """The first of a user's overrides that chooses the group ``precision``, or None.

    It would win over the command's own word, and the results would be named after the other precision.
    """
    return next((word for word in words if word.partition("=")[0].lstrip("+~") == "precision"), None)


def quote(value: object) -> str:
    """A value as Hydra's override grammar reads it; paths are quoted, since they may hold ``=`` or spaces."""
    if isinstance(value, Path):
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)

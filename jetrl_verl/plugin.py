# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``verl.plugins``: makes ``precision=`` known to stock verl.

verl loads this module in every process that imports verl: driver, Ray actors, vLLM workers. So it imports nothing and
only registers callbacks: for the import of Hydra and of the modules that every precision patches. verl logs a plugin
that fails to load at DEBUG only, and a worker could train in BF16 without a word, so a failure is printed on stderr
before it is raised.
"""

import functools
import importlib
import os

from jetrl_verl.patches.after_import import announce, when_imported

PATCHED_FOR_EVERY_PRECISION = {
    "log_probs": ("verl.utils.torch_functional",),
    "micro_batches": ("verl.utils.tensordict_utils", "verl.workers.engine.fsdp.transformer_impl"),
    "frozen_heap": ("verl.trainer.ppo.v1.trainer_base", "verl.workers.engine.fsdp.transformer_impl"),
    "replay_buffer": ("verl.trainer.ppo.v1.replay_buffer",),
    "equal_lengths": ("verl.utils.tensordict_utils",),
    "attention_name": ("verl.utils.model", "verl.models.transformers.monkey_patch"),
    "two_runs": ("verl.workers.rollout.vllm_rollout.vllm_rollout", "verl.workers.rollout.vllm_rollout.utils"),
    "weight_sync": (
        "verl.workers.rollout.vllm_rollout.vllm_rollout",
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    ),
    "separate_rollout": ("verl.trainer.ppo.v1.trainer_separate_async",),
    "token_versions": ("verl.workers.rollout.llm_server",),
    "dead_servers": (
        "verl.trainer.ppo.v1.trainer_base",
        "verl.trainer.ppo.v1.trainer_separate_async",
        "verl.workers.rollout.vllm_rollout.utils",
    ),
    "worker_errors": ("verl.workers.rollout.vllm_rollout.vllm_async_server",),
    "generation": ("verl.workers.rollout.vllm_rollout.vllm_async_server", "vllm.v1.engine.output_processor"),
    "tied_head": ("vllm.model_executor.models.utils",),
}
"""Modules of patches/ that apply under every precision, baselines included, and the modules of verl and vLLM that each
patches: faster functions with equal results, ``attn_implementation=jetrl_varlen``, a socket of the run's own, mRoPE for
sequences of one length, tied heads, and an end of the run where a rollout worker or server fails."""

FSDP_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
CHECKPOINT_ENGINES = "verl.checkpoint_engine.base"


def _register_with_hydra() -> None:
    from jetrl_verl.config.hydra_plugin import register

    register()


def _register_attention() -> None:
    from jetrl_verl.train.register import register

    register()


def _register_checkpoint_engine() -> None:
    importlib.import_module("jetrl_verl.sync.checkpoint_engine")


def _apply(target: str, module: str) -> None:
    for patch in importlib.import_module(f"jetrl_verl.patches.{module}").PATCHES:
        if patch.module == target:  # applying another one would import its module
            patch.apply()


def _install() -> None:
    when_imported("hydra", "jetrl: register", _register_with_hydra)
    when_imported(FSDP_ENGINE, "jetrl: attention", _register_attention)
    when_imported(CHECKPOINT_ENGINES, "jetrl: weight sync", _register_checkpoint_engine)
    for module, targets in PATCHED_FOR_EVERY_PRECISION.items():
        for target in targets:
            when_imported(target, f"jetrl: {module}", functools.partial(_apply, target, module))

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from jetrl_verl import cpu_platform

        cpu_platform.install()


try:
    _install()
except Exception:
    announce()
    raise

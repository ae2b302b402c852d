# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``verl.plugins``: what makes the bare flag ``precision=jet_fp8`` known to stock verl.

verl loads this module at the end of ``verl/__init__.py``, in every process that imports verl: the driver, each Ray
actor, each vLLM worker. So it imports nothing and does cheap things only: it asks to be called when Hydra is imported
(verl itself imports Hydra only where it composes or instantiates a config) and when the modules are that every
precision patches, or that need our attention's name, and it installs the CPU platform where it was asked for.

verl logs a plugin that fails to load at DEBUG only. A flag that then does nothing, or a worker that trains in BF16,
would be the worst outcome, so a failure here is announced on stderr before it is raised.
"""

import functools
import importlib
import os

from jetrl_verl.patches.after_import import announce, when_imported

PATCHED_FOR_EVERY_PRECISION = {
    "verl.utils.torch_functional": "log_probs",
    "verl.trainer.ppo.v1.replay_buffer": "replay_buffer",
    "verl.utils.model": "attention_name",
    "verl.workers.rollout.vllm_rollout.vllm_rollout": "two_runs",
    "verl.workers.rollout.vllm_rollout.utils": "two_runs",
    "verl.workers.rollout.vllm_rollout.vllm_async_server": "generation",
    "vllm.v1.engine.output_processor": "generation",
}
"""Modules of verl and vLLM that get other functions, baselines included, and the module of patches/: faster ones with
equal results, ones that differ for ``attn_implementation=jetrl_varlen`` alone, and a socket that no other run has."""

FSDP_ENGINE = "verl.workers.engine.fsdp.transformer_impl"


def _register_with_hydra() -> None:
    from jetrl_verl.config.hydra_plugin import register

    register()


def _register_attention() -> None:
    from jetrl_verl.train.register import register

    register()


def _apply(target: str, module: str) -> None:
    for patch in importlib.import_module(f"jetrl_verl.patches.{module}").PATCHES:
        if patch.module == target:  # applying another one would import its module
            patch.apply()


def _install() -> None:
    when_imported("hydra", "jetrl: register", _register_with_hydra)
    when_imported(FSDP_ENGINE, "jetrl: attention", _register_attention)
    for target, module in PATCHED_FOR_EVERY_PRECISION.items():
        when_imported(target, f"jetrl: {module}", functools.partial(_apply, target, module))

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from jetrl_verl import cpu_platform

        cpu_platform.install()


try:
    _install()
except Exception:
    announce()
    raise

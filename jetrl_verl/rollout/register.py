# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: registers the names of our quantization methods with vLLM.

vLLM calls :func:`register` in every process it starts, mostly for engines that have nothing to do with this project.
"""

import os
import sys
import traceback
import types
from typing import Any

import torch


def register() -> None:
    """Register the quantization methods' names and, on the opt-in CPU platform, what vLLM needs there.

    A failure is printed and not raised, since this process may run somebody else's model. An engine that asks for one
    of the methods then stops at its unknown name.
    """
    try:
        # vLLM's attention on a CPU runs AMX instructions, and nothing but oneDNN's first product asks Linux for them.
        torch.cpu._init_amx()
        _announce_methods()
        if os.environ.get("VERL_PLATFORM") == "cpu":
            _prepare_cpu()
    except Exception:
        print("jetrl_verl: the vLLM plugin failed to load, so FP8 rollouts will not work:", file=sys.stderr)
        traceback.print_exc()


def _prepare_cpu() -> None:
    from transformers.utils import is_torchvision_available

    from jetrl_verl.patches import fork_on_cpu, hybrid_on_cpu, reloadable_weights_on_cpu
    from jetrl_verl.patches.after_import import when_imported

    for patch in (*reloadable_weights_on_cpu.PATCHES, *fork_on_cpu.PATCHES):
        patch.apply()
    for patch in hybrid_on_cpu.PATCHES:
        if patch.applies:
            when_imported(patch.module, f"jetrl: {patch.function}", patch.apply)
    if not is_torchvision_available():
        # vLLM's models with vision import a name of it even for text, and no wheel runs with torch 2.13's CPU build.
        absent = types.ModuleType("torchvision.transforms.v2")
        absent.functional = None
        sys.modules.setdefault(absent.__name__, absent)


def _announce_methods() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from jetrl_verl import formats

    for method in formats.VLLM_METHODS.values():
        if method not in QUANTIZATION_METHODS:
            register_quantization_config(method)(_announced(method))


def _announced(method: str) -> type:
    """A placeholder that imports the method when vLLM calls ``from_config``, its only way to make a configuration."""
    from vllm.model_executor.layers.quantization import QuantizationConfig

    class Announced(QuantizationConfig):
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            from jetrl_verl.rollout.method import CONFIGS

            return CONFIGS[method].from_config(config)

    return Announced

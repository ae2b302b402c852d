# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``: makes our quantization methods known by name in every process that vLLM starts.

vLLM calls :func:`register` in the server, the engine core and each worker, possibly more than once per process, and
mostly for engines that have nothing to do with this project. So a few names are all that it leaves there: what they
stand for is imported when an engine asks for one of them, and layers are changed by that engine's worker alone
(rollout/worker.py).
"""

import os
import sys
import traceback
from typing import Any


def register() -> None:
    """Register the quantization methods' names; on the opt-in CPU platform also what BF16 training needs there.

    A failure is announced and not raised: vLLM would end with it, and this process may run a model that has nothing to
    do with this project. Where a method was asked for, vLLM then stops at its unknown name.
    """
    try:
        _announce_methods()
        if os.environ.get("VERL_PLATFORM") == "cpu":
            from jetrl_verl.patches import fork_on_cpu, reloadable_weights_on_cpu

            reloadable_weights_on_cpu.KEEP_WEIGHT.apply()
            reloadable_weights_on_cpu.KEEP_EXPERTS.apply()
            fork_on_cpu.FORK.apply()
    except Exception:
        print("jetrl_verl: the vLLM plugin failed to load, so FP8 rollouts will not work:", file=sys.stderr)
        traceback.print_exc()


def _announce_methods() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from jetrl_verl import formats

    for method in formats.VLLM_METHODS.values():
        if method not in QUANTIZATION_METHODS:
            register_quantization_config(method)(_announced(method))


def _announced(method: str) -> type:
    """What stands for a method until an engine asks for it. vLLM makes a configuration by ``from_config`` alone."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Announced(QuantizationConfig):
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            from jetrl_verl.rollout.method import CONFIGS

            return CONFIGS[method].from_config(config)

    return Announced

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""BF16 weights of vLLM's CPU build stay reloadable on the CPU platform (jetrl_verl/cpu_platform.py).

vLLM 0.24.0 packs a CPU linear layer's weight at load and drops the original (``remove_weight=True``), so the next
weight sync meets a parameter of size 0. Experts are packed into a layout that no loader knows. Here layers and experts
multiply with the parameters themselves, which is slower; for models small enough for a CPU it does not matter.
"""

import inspect
import os

import torch

from jetrl_verl.patches.patch import Patch

REACHES = ("vllm.model_executor.layers.fused_moe.cpu_fused_moe:_CPU_MOE_ACT_FN",)
"""A private name of the module of a replaced function; scripts/reach.py watches it."""


def dispatch_cpu_unquantized_gemm(stock, layer: torch.nn.Module, remove_weight: bool) -> None:
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return stock(layer, remove_weight)
    layer.cpu_linear = torch.nn.functional.linear


KEEP_WEIGHT = Patch(
    replaces="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    version="0.24.0",
    sha256="7a5fa545aea150ed34e6a277aeb55fe86c1942321701197870b829ea79db0d99",
    by=dispatch_cpu_unquantized_gemm,
    symptom="a weight sync cannot load BF16 linears on the CPU",
    upstream="inference never reloads a weight; no issue is known",
    until="vLLM keeps a CPU linear's weight on request",
    needed=True,
)


def check_grouped_gemm(stock, self, layer: torch.nn.Module) -> tuple[bool, str]:
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return stock(self, layer)
    # vLLM builds a module in every forward of this path, where no vLLM configuration is set.
    names = inspect.getmodule(type(self))
    names._CPU_MOE_ACT_FN[names.MoEActivation.SILU] = names.SiluAndMul.forward_native
    return False, "none"


KEEP_EXPERTS = Patch(
    replaces="vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.check_grouped_gemm",
    version="0.24.0",
    sha256="a8aec7c0b87b4de48ab7e89925c3a7fc159efd2853d8763b06387f07ee427aee",
    by=check_grouped_gemm,
    symptom="a weight sync cannot load BF16 experts on the CPU: their parameters have no weight_loader any more",
    upstream="inference never reloads a weight; no issue is known",
    until="vLLM keeps a CPU mixture's weights on request",
    needed=True,
)
PATCHES = (KEEP_WEIGHT, KEEP_EXPERTS)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""BF16 weights of vLLM's CPU build stay reloadable on the CPU platform (jetrl_verl/cpu_platform.py).

vLLM packs a CPU linear layer's weight at load and drops the original (``remove_weight=True``), so the next weight sync
meets a parameter of size 0. Experts are packed into a layout that no loader knows. Here linear layers multiply with the
parameters themselves; so do experts of vLLM 0.24, and those of 0.29 pack their parameters at each call. It is slower;
for models small enough for a CPU it does not matter.
"""

import inspect
import os
from typing import Any

import torch

from jetrl_verl.patches.patch import Patch

REACHES = (
    "vllm._custom_ops:cpu_prepack_moe_weight",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:_CPU_MOE_ACT_FN",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts._pad_moe_intermediate",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts._use_zentorch",
)
"""What this file uses of the replaced functions' modules and class; scripts/reach.py watches it."""


def dispatch_cpu_unquantized_gemm(stock, layer: torch.nn.Module, remove_weight: bool) -> None:
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return stock(layer, remove_weight)
    layer.cpu_linear = torch.nn.functional.linear


KEEP_WEIGHT = Patch(
    replaces="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    sha256={
        "0.24.0": "7a5fa545aea150ed34e6a277aeb55fe86c1942321701197870b829ea79db0d99",
        "0.29.0": "de5e8361f35617586616fed2011e100df5de31ce700e750cfb14d64e2f6cdbc6",
    },
    by=dispatch_cpu_unquantized_gemm,
    symptom="a weight sync cannot load BF16 linears on the CPU",
    upstream="inference never reloads a weight; no issue is known",
    until="vLLM keeps a CPU linear's weight on request",
    needed=True,
)


_OF_EXPERTS = dict(
    symptom="a weight sync cannot load BF16 experts on the CPU: their parameters are packed",
    upstream="inference never reloads a weight; no issue is known",
    until="vLLM keeps a CPU mixture's weights on request",
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
    sha256={"0.24.0": "a8aec7c0b87b4de48ab7e89925c3a7fc159efd2853d8763b06387f07ee427aee"},
    by=check_grouped_gemm,
    **_OF_EXPERTS,
)


def process_weights_after_loading(stock, self: Any, layer: torch.nn.Module) -> None:
    parameters = layer.w13_weight, layer.w2_weight
    stock(self, layer)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        layer.w13_weight, layer.w2_weight = parameters


def apply(
    stock, self: Any, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if os.environ.get("VERL_PLATFORM") == "cpu" and not self._use_zentorch:
        packed = torch.nn.Module()
        packed.w13_weight, packed.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w1, w2))
        self._pad_moe_intermediate(packed)
        pack = inspect.getmodule(inspect.unwrap(stock)).cpu_prepack_moe_weight
        w1, w2 = pack(packed.w13_weight, self.isa), pack(packed.w2_weight, self.isa)
    return stock(self, hidden_states, w1, w2, *args, **kwargs)


KEEP_PARAMETERS = Patch(
    replaces=(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
        ":UnquantizedFusedMoEMethod.process_weights_after_loading"
    ),
    sha256={"0.29.0": "8e3f130db8129c027abc5a1280608f6721ef22b1b6e747043532a6a830ef8a4d"},
    by=process_weights_after_loading,
    **_OF_EXPERTS,
)
PACK_AT_CALL = Patch(
    replaces="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
    sha256={"0.29.0": "3e0f023d3f3cd3db0466412576617069a83089421cf124022a7f44da8e8d552a"},
    by=apply,
    **_OF_EXPERTS,
)
PATCHES = (KEEP_WEIGHT, KEEP_EXPERTS, KEEP_PARAMETERS, PACK_AT_CALL)

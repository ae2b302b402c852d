# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The program that tells the driver what other plugins have replaced in vLLM (config/vllm_plugins.py).

Loads vLLM and its plugins as a worker does, builds nothing, and prints a JSON list as its last line.
"""

import json
import sys
from collections.abc import Iterator

from vllm.plugins import load_general_plugins

from jetrl_verl.rollout import vllm_compat as vllm

BUILT_ON: tuple[type, ...] = (
    *(vllm.RMSNorm, vllm.SiluAndMul, vllm.RotaryEmbedding, vllm.Llama3RotaryEmbedding, vllm.LogitsProcessor),
    *(vllm.Qwen3Attention, vllm.Qwen3MoeAttention, vllm.Qwen3MoeSparseMoeBlock, vllm.Attention, vllm.RoutedExperts),
    *(vllm.QKVParallelLinear, vllm.MergedColumnParallelLinear, vllm.RowParallelLinear, vllm.VocabParallelEmbedding),
    *(vllm.Sampler, vllm.SamplerV2),
)
"""Classes of vLLM that the shared operations subclass or read."""

REACHES = (
    "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls",
    "vllm.platforms.interface:Platform.is_out_of_tree",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""


def replacements(architecture: str) -> Iterator[str]:
    """What of vLLM is not its own in this process, in words; ``architecture``: of the model's ``config.json``."""
    if vllm.current_platform.is_out_of_tree():
        yield f"the platform {type(vllm.current_platform).__module__}"
    for stock in BUILT_ON:
        module = sys.modules[stock.__module__]
        other = vllm.op_registry_oot.get(stock.__name__) or getattr(module, stock.__name__)
        if other is not stock:
            yield f"the layer {other.__module__}.{other.__qualname__} instead of {stock.__name__}"
    for backend in (vllm.AttentionBackendEnum.FLASH_ATTN, vllm.AttentionBackendEnum.CPU_ATTN):
        if backend.is_overridden():
            yield f"the attention backend {backend.get_path()} as {backend.name}"
    model = vllm.ModelRegistry.models.get(architecture)
    if model is not None and not (built := model.load_model_cls()).__module__.startswith("vllm."):
        yield f"the model {built.__module__}.{built.__qualname__} as {architecture}"


if __name__ == "__main__":
    load_general_plugins()
    print(json.dumps(list(replacements(sys.argv[1]))))

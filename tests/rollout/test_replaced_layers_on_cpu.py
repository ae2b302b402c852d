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
"""Layers of vLLM's that are built as classes of ours: where no run asked for shared operations they are as vLLM's."""

from collections import Counter

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

from jetrl_verl.rollout import shared_operations

ROTARY = (64, 64, 32, 1e4, True, torch.bfloat16)
"""Head size, rotated part of it, positions, base, neox style and type."""

SETTINGS = [
    ["none"],
    ["all"],
    *([default, switch] for default in ("none", "all") for switch in ("+rms_norm", "-silu_and_mul")),
    ["none", "+rms_norm", "+silu_and_mul", "+rotary_embedding"],
    ["all", "-rms_norm", "-silu_and_mul", "-rotary_embedding"],
]


def built(settings: list[str]) -> tuple[list[torch.nn.Module], Counter, Counter]:
    """One layer of each kind in an engine with these ``custom_ops``, and how many vLLM switched on and off by name."""
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=list(settings)))
    with set_current_vllm_config(config):
        layers = [
            RMSNorm(128),
            SiluAndMul(),
            RotaryEmbedding(*ROTARY),
            Llama3RotaryEmbedding(*ROTARY, 8.0, 1.0, 4.0, 16),
        ]
    return layers, config.compilation_config.enabled_custom_ops, config.compilation_config.disabled_custom_ops


@pytest.mark.parametrize("settings", SETTINGS, ids=",".join)
def test_settings_of_single_operations_speak_about_our_classes_too(settings, monkeypatch):
    layers, *switched = built(settings)
    assert [type(layer) for layer in layers] == [
        shared_operations.SharedRMSNorm,
        shared_operations.SharedSiluAndMul,
        shared_operations.SharedRotaryEmbedding,
        shared_operations.SharedLlama3RotaryEmbedding,
    ]
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    stock, *expected = built(settings)
    assert [type(layer) for layer in stock] == [RMSNorm, SiluAndMul, RotaryEmbedding, Llama3RotaryEmbedding]
    assert switched == expected
    for ours, theirs in zip(layers, stock, strict=True):
        assert type(ours).name == type(theirs).name
        assert ours._forward_method.__qualname__ == theirs._forward_method.__qualname__

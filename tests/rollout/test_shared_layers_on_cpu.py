# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that vLLM built are replaced by the shared ones, whatever vLLM chose for them, if these cover them."""

from collections import Counter

import pytest
import torch
from tiny_models import tiny_config
from torch import nn
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from jetrl_verl import kernels
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.rollout import shared_operations
from jetrl_verl.rollout.shared_operations import SharedRMSNorm, share_operations

HEAD = 128
ROTARY = (HEAD, HEAD, 32, 1e4, True, torch.bfloat16)
"""Head size, rotated part of it, positions, base, neox style and type."""
LLAMA3 = (8.0, 1.0, 4.0, 16)
CONFIG = tiny_config("llama", max_position_embeddings=32)

SETTINGS = [
    ["none"],
    ["all"],
    *([default, switch] for default in ("none", "all") for switch in ("+rms_norm", "-silu_and_mul")),
    ["none", "+rms_norm", "+silu_and_mul", "+rotary_embedding"],
    ["all", "-rms_norm", "-silu_and_mul", "-rotary_embedding"],
]


class Model(nn.Module):
    """A model with these layers and no decoder layer."""

    config = tiny_config("llama", num_hidden_layers=0)

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def get_submodule(self, target: str) -> object:
        return [] if target.endswith("layers") else SharedRMSNorm.__new__(SharedRMSNorm)


def built(settings: list[str]) -> tuple[Model, CompilationConfig]:
    """One layer of each kind in an engine with these ``custom_ops``."""
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=list(settings)))
    with set_current_vllm_config(config):
        model = Model(
            norm=RMSNorm(HEAD),
            activation=SiluAndMul(),
            rotary=RotaryEmbedding(*ROTARY),
            offset_norm=GemmaRMSNorm(HEAD),
            mrope=MRotaryEmbedding(*ROTARY, [22, 22, 20], True),
            scaled=Llama3RotaryEmbedding(*ROTARY, *LLAMA3),
        )
    return model, config.compilation_config


def switched(config: CompilationConfig) -> tuple[Counter, Counter]:
    """Number of custom operations that vLLM switched on and off, by name."""
    return config.enabled_custom_ops.copy(), config.disabled_custom_ops.copy()


@pytest.mark.parametrize("settings", SETTINGS, ids=",".join)
def test_vllms_custom_ops_settings_keep_their_meaning(settings):
    model, config = built(settings)
    stock, counted = [type(layer) for layer in model.children()], switched(config)
    assert stock == [*(RMSNorm, SiluAndMul, RotaryEmbedding, GemmaRMSNorm, MRotaryEmbedding, Llama3RotaryEmbedding)]
    with set_current_vllm_config(VllmConfig(compilation_config=config)):
        enabled = [kind.enabled() for kind in stock]
        share_operations(model, CONFIG)
        layers = list(model.children())
        assert [type(layer).enabled() for layer in layers] == enabled
    assert [type(layer) for layer in layers] == [
        shared_operations.SharedRMSNorm,
        shared_operations.SharedSiluAndMul,
        shared_operations.SharedRotaryEmbedding,
        shared_operations.SharedGemmaRMSNorm,
        shared_operations.SharedMRotaryEmbedding,
        shared_operations.SharedLlama3RotaryEmbedding,
    ]
    for layer, kind in zip(layers, stock, strict=True):
        assert type(layer).name == kind.name
        assert layer._forward_method.__func__ is type(layer)._forward_shared and layer._forward_method.__self__ is layer
    assert switched(config) == counted


def test_a_rotary_cached_for_other_engines_is_not_changed():
    with set_current_vllm_config(VllmConfig()):
        cached = RotaryEmbedding(*ROTARY)
    table, forward = cached.cos_sin_cache.clone(), cached._forward_method
    model = Model(first=Model(rotary_emb=cached), second=Model(rotary_emb=cached))
    share_operations(model, CONFIG)
    assert type(cached) is RotaryEmbedding and cached._forward_method == forward
    assert torch.equal(cached.cos_sin_cache, table)
    own = model.first.rotary_emb
    assert own is model.second.rotary_emb is not cached
    assert torch.equal(own.cos_sin_cache, kernels.rotary_table(HEAD, 32, CONFIG.rope_parameters))
    assert dict(own.named_buffers()).keys() == dict(cached.named_buffers()).keys() and not own.state_dict()


def test_parameters_and_their_loaders_are_not_changed():
    with set_current_vllm_config(VllmConfig()):
        model = Model(norm=RMSNorm(HEAD))
    weight = model.norm.weight
    weight.weight_loader = loader = object()
    share_operations(model, CONFIG)
    assert model.norm.weight is weight and weight.weight_loader is loader
    assert list(model.state_dict()) == ["norm.weight"]


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (lambda: RMSNorm(HEAD, has_weight=False), "a norm without a weight"),
        (lambda: RMSNorm(HEAD, var_hidden_size=HEAD // 2), "over a part of a row"),
        (lambda: RotaryEmbedding(HEAD, HEAD // 2, *ROTARY[2:]), "rotary of 64 of the 128 features of a head"),
        (lambda: RotaryEmbedding(*ROTARY[:4], False, torch.bfloat16), "interleaved pairs"),
        (lambda: MRotaryEmbedding(*ROTARY, [22, 22, 20], True, scaling_factor=2.0), "do not cover YaRN"),
        (lambda: LinearScalingRotaryEmbedding(*ROTARY[:5], 2.0, torch.bfloat16), "the layer LinearScaling"),
        (lambda: LogitsProcessor(100, scale=0.5), "scaled logits"),
        (lambda: LogitsProcessor(100, soft_cap=30.0), "soft-capped logits"),
    ],
    ids=["no weight", "part of a row", "part of a head", "pairs", "YaRN", "another rotary", "scaled", "capped"],
)
def test_a_layer_that_is_not_covered_is_refused(layer, complaint):
    with set_current_vllm_config(VllmConfig()):
        model = Model(layer=layer())
    with pytest.raises(UnsupportedConfiguration, match=complaint) as refused:
        share_operations(model, CONFIG)
    message = str(refused.value)
    assert " is not supported with jetrl.operations=shared: " in message
    assert message.endswith(". Set precision=jet_fp8 jetrl.operations=stock, or precision=bf16.")


@pytest.mark.parametrize("where", ["a decoder layer", "the model's end"])
def test_a_norm_of_another_class_than_the_familys_is_refused(where):
    """A subclass or another class would otherwise stay vLLM's."""
    with set_current_vllm_config(VllmConfig()):
        norms = {name: RMSNorm(HEAD) for name in ("input_layernorm", "post_attention_layernorm", "norm")}
        norms["norm" if where == "the model's end" else "post_attention_layernorm"] = GemmaRMSNorm(HEAD)
    model = nn.Module()
    model.config, model.model = tiny_config("llama", num_hidden_layers=1), nn.Module()
    model.model.norm, layer = norms.pop("norm"), Model(**norms)
    model.model.layers = nn.ModuleList([layer])
    layer.get_submodule = lambda name: getattr(layer, name)
    with pytest.raises(UnsupportedConfiguration, match="a norm of the class SharedGemmaRMSNorm"):
        share_operations(model, model.config)


def test_layers_of_a_hybrid_compute_what_vllms_do():
    """1 + weight in FP32, in rows whose mean of squares rounds as vLLM's; a part of the head, by the first position."""
    generator = torch.Generator().manual_seed(0)
    x, q, k = (torch.randn(512, width, generator=generator).bfloat16() for width in (HEAD, 2 * 256, 256))
    positions = torch.arange(512).expand(3, -1) % 32
    with set_current_vllm_config(VllmConfig()):
        norm, rotary = (
            GemmaRMSNorm(HEAD).bfloat16(),
            MRotaryEmbedding(256, 64, 32, 1e7, *ROTARY[4:], [11, 11, 10], True),
        )
        norm.weight.data = torch.randn(HEAD, generator=generator).bfloat16()
        expected, expected_heads = norm.forward_native(x), rotary.forward_native(positions, q.clone(), k.clone())
        model = Model(norm=norm, rotary=rotary)
        rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
        share_operations(model, tiny_config("llama", head_dim=256, max_position_embeddings=32, rope_parameters=rope))
    with torch.no_grad():
        y, heads = model.norm(x), model.rotary(positions, q, k)
        same = torch.ops.jetrl.rms_norm(x, norm.weight, 1e-6)[1] == (x.float().pow(2).mean(-1) + 1e-6).rsqrt()
    assert same.float().mean() > 0.5 and torch.equal(y[same], expected[same])
    for got, want in zip(heads, expected_heads, strict=True):
        got, want = (part.unflatten(1, (-1, 256)) for part in (got, want))
        assert torch.equal(got[..., 64:], want[..., 64:]) and (got - want).float().norm() < 2**-6 * want.float().norm()

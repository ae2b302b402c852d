# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Families: names compared with Hugging Face and vLLM, discovery, Seed-OSS, and who may name a layer's parts."""

import re
from dataclasses import fields

import pytest
import torch
from tiny_models import ALL, FAMILIES, OWN_FIELDS, tiny_config
from torch import nn

from jetrl_verl.models import Family, UnsupportedLayer, UnsupportedOperation, families, family, model_types
from jetrl_verl.models.families.base import leaf, place
from jetrl_verl.models.plan import plan_linears, plan_of
from jetrl_verl.rollout.register import register
from jetrl_verl.sources import source_files
from jetrl_verl.tools.memory.shapes import KNOWN
from jetrl_verl.train.shared_operations import share_operations

# From config.json of ByteDance-Seed/Seed-OSS-36B-Instruct.
SEED_OSS_36B = {
    "model_type": "seed_oss",
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "tie_word_embeddings": False,
}


def of_type(model_type: str) -> Family:
    return family({"model_type": model_type})


def on_meta(model_type: str) -> nn.Module:
    with torch.device("meta"):
        return ALL[model_type][1](tiny_config(model_type))


def test_every_family_has_a_tiny_model():
    assert set(model_types()) == set(ALL)


@pytest.mark.parametrize("model_type", ALL)
def test_names_and_shapes_are_those_of_hugging_face(model_type):
    model, decoder = on_meta(model_type), of_type(model_type)
    plans = plan_linears(model.config)
    assert list(plans) == list(decoder.projections)
    bf16 = {piece for linear in decoder.linears if linear.bf16 for piece in linear.pieces}
    assert {name for name, plan in plans.items() if not plan.quantized} == bf16
    experts = {name: plan for name, plan in plans.items() if plan.experts > 1}
    assert bool(experts) == (decoder.experts is not None)
    assert len(model.get_submodule(decoder.layers)) == model.config.get_text_config().num_hidden_layers
    for layer, names in decoder.named_layers(model):
        modules = dict(layer.named_modules())
        linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        assert {name: tuple(module.weight.shape) for name, module in linears.items()} == {
            name: (plans[name].n, plans[name].k) for name in names.projections if name not in experts
        }
        for name, plan in experts.items():
            assert tuple(layer.get_parameter(name).shape) == (plan.experts, plan.n, plan.k)
        assert {name for name, module in modules.items() if type(module).__name__.endswith("Norm")} == set(names.norms)
        assert set(names.parts) <= set(modules)
        if (delta := names.delta_net) is not None:
            of_modules = {f"{module}.weight" for module in modules}
            assert {delta.a_log, delta.dt_bias} == set(dict(layer.named_parameters())) - of_modules - set(experts)


@pytest.mark.parametrize("model_type", ALL)
def test_merged_projections_are_those_of_vllm(model_type, cpu_platform):
    from vllm.model_executor.models import ModelRegistry

    register()  # vLLM's models with vision import torchvision, which is absent from some installations
    architecture = ALL[model_type][1].__name__
    merged = {
        leaf(linear.name): [leaf(piece) for piece in linear.pieces]
        for linear in of_type(model_type).linears
        if len(linear.pieces) > 1
    }
    packed = ModelRegistry.models[architecture].load_model_cls().packed_modules_mapping
    assert {name: packed[name] for name in merged} == merged


def test_an_unknown_model_type_is_refused():
    with pytest.raises(UnsupportedLayer, match="model_type 'gpt2' is none of llama, mistral, qwen2, qwen2_5_vl, "):
        family({"model_type": "gpt2"})
    with pytest.raises(UnsupportedLayer, match="model_type 'unknown' is none of"):
        family({})


def test_a_dense_family_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "newcomer.py").write_text(
        "from jetrl_verl.models import Family\n"
        'FAMILY = Family("newcomer", q="attn.query", k="attn.key", v="attn.value", qkv="attn.mixed")\n'
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families._families.cache_clear()
    try:
        config = tiny_config("llama").to_dict() | {"model_type": "newcomer"}
        assert model_types()[-1] == "newcomer"
        plans = plan_linears(config)
        assert [name for name, plan in plans.items() if plan.kind == "qkv"] == ["attn.query", "attn.key", "attn.value"]
        assert plan_of("model.layers.1.attn.key.weight", plans) is plans["attn.key"]
        assert family(config).pieces["attn.mixed"] == ("attn.query", "attn.key", "attn.value")
        assert family(config).handoffs[0].readers == ("attn.query", "attn.key", "attn.value")
    finally:
        families._families.cache_clear()


def test_place_splits_names():
    assert place("model.layers.12.mlp.experts.7.gate_proj.weight") == (
        "model.layers.12",
        12,
        "mlp.experts.7.gate_proj",
        "weight",
    )
    assert place("layers.0.self_attn") == ("layers.0", 0, "self_attn", "")
    assert place("model.layers.3.self_attn.q_proj.bias") == ("model.layers.3", 3, "self_attn.q_proj", "bias")
    assert place("model.norm.weight") is place("model.layers.3") is place("lm_head.weight") is None


@pytest.mark.parametrize(
    ("tp", "shards"),
    [
        (1, {"q": (10240, 5120), "kv": (1024, 5120), "o": (5120, 10240), "up": (27648, 5120), "down": (5120, 27648)}),
        (2, {"q": (5120, 5120), "kv": (512, 5120), "o": (5120, 5120), "up": (13824, 5120), "down": (5120, 13824)}),
        (4, {"q": (2560, 5120), "kv": (256, 5120), "o": (5120, 2560), "up": (6912, 5120), "down": (5120, 6912)}),
        (8, {"q": (1280, 5120), "kv": (128, 5120), "o": (5120, 1280), "up": (3456, 5120), "down": (5120, 3456)}),
    ],
)
def test_seed_oss_36b_fits_at_every_tensor_parallel_size(tp, shards):
    plans = plan_linears(SEED_OSS_36B, tp)
    shapes = [(plan.shard_n, plan.shard_k) for plan in plans.values()]
    assert shapes == [shards[name] for name in ("q", "kv", "kv", "o", "up", "up", "down")]
    assert [plan.kind for plan in plans.values()] == ["qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down"]
    assert all(plan.quantized for plan in plans.values())


@pytest.mark.parametrize(
    ("config", "most_ranks", "layer"),
    [
        (SEED_OSS_36B, 8, r"mlp\.gate_proj has shards of shape \[1728, 5120\]"),
        (KNOWN["qwen2.5-0.5b"], 1, r"self_attn\.q_proj has shards of shape \[448, 896\]"),
        (KNOWN["llama-3.2-1b"], 4, r"self_attn\.k_proj has shards of shape \[64, 2048\]"),
        (KNOWN["qwen3.5-0.8b"], 4, r"mlp\.gate_proj has shards of shape \[448, 1024\]"),
        (KNOWN["qwen3.5-35b-a3b"], 4, r"mlp\.experts\.down_proj has shards of shape \[2048, 64\]"),
        (
            KNOWN["qwen3.5-27b"],
            8,
            "its 24 heads over 4 key heads and its delta net's 48 heads over 16 key heads are not",
        ),
    ],
)
def test_the_most_ranks_over_which_shards_are_whole_blocks(config, most_ranks, layer):
    """Qwen2.5-0.5B has 14 heads of 64 over 2 key heads, Llama-3.2-1B 32 over 8."""
    plans = plan_linears(config, most_ranks).values()
    assert {plan.kind for plan in plans if not plan.quantized} <= {"ba", "shared_gate"}
    with pytest.raises(UnsupportedLayer, match=layer) as refused:
        plan_linears(config, 2 * most_ranks)
    assert refused.value.largest == most_ranks


@pytest.mark.parametrize(
    ("switch", "value"), [("attention_bias", False), ("attention_out_bias", True), ("mlp_bias", True)]
)
def test_biases_that_vllms_seed_oss_lacks_are_refused(switch, value):
    with pytest.raises(UnsupportedLayer, match=f"it has {switch}={str(value).lower()}, and vLLM's class has"):
        plan_linears(SEED_OSS_36B | {switch: value})


def test_seed_oss_shares_operations_only_without_dropout():
    decoder = of_type("seed_oss")
    rates = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    decoder.check_operations(SEED_OSS_36B | rates)
    for name in rates:
        trained = SEED_OSS_36B | {other: 0.0 for other in rates if other != name}
        text = f"do not cover {name.replace('_', ' ')}$"
        with pytest.raises(UnsupportedOperation, match=text) as refused:
            decoder.check_operations(trained)
        assert refused.value.row == name
        with pytest.raises(UnsupportedOperation, match=text):
            share_operations(FAMILIES["seed_oss"][1](tiny_config("seed_oss", **{name: 0.1})))
    assert OWN_FIELDS["seed_oss"] == rates, "tests run the model without dropout"


def names_of_layers() -> re.Pattern:
    """Projections, norms and activations of every family; names that are also fields must be quoted to match."""
    names = set()
    for decoder in map(of_type, model_types()):
        names |= {*map(leaf, (*decoder.projections, *decoder.pieces, *decoder.norms, decoder.activation))}
    quoted = names & {field.name for field in fields(Family)}
    return re.compile(rf"\b(?:{'|'.join(names - quoted)})\b|[\"'`](?:{'|'.join(quoted)})[\"'`]")


def test_no_file_outside_models_names_a_part_of_a_layer():
    pattern, lines = names_of_layers(), []
    assert pattern.search("layer.self_attn.o_proj(x)") and not pattern.search("return family.q_norm")
    for name, file in source_files(suffixes=(".py", ".yaml", ".html")).items():
        if not name.startswith("models/"):
            lines += [f"{name}: {line}" for line in file.read_text().splitlines() if pattern.search(line)]
    assert not lines, "ask jetrl_verl.models.family(config) for it:\n" + "\n".join(lines)

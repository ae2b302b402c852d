# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Modules, formats and options survive pickle, deepcopy, torch.save and a state dict: results have the same bits."""

import copy
import importlib
import inspect
import io
import pickle
import pkgutil
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_config, tiny_model
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import jetrl_verl.formats
import jetrl_verl.models
import jetrl_verl.nn
import jetrl_verl.reference
import jetrl_verl.train
from jetrl_verl import formats
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.models.families.base import Experts
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.adapter import Factor
from jetrl_verl.nn.attention import AttentionCore
from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.train.adapters import MergedAdapter
from jetrl_verl.train.shared_operations import share_operations

FLOW = formats.get("fp8")


def saved(value: object, **options: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES: dict[str, Callable[[object], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: saved(value, weights_only=False),
}


# --- modules ---------------------------------------------------------------------------------------------------------


def linear() -> JetLinear:
    return JetLinear.replace(nn.Linear(256, 128).bfloat16(), FLOW, scale_rule="pow2", backward="fp8", ranks=2)


def experts() -> JetExperts:
    stock = Qwen3MoeExperts(tiny_config("qwen3_moe"))
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.05)
    return JetExperts.replace(stock, FLOW, Experts(), scale_rule="fp32")


def adapted() -> MergedAdapter:
    layer = nn.ModuleDict({"o": linear()})
    model = get_peft_model(layer, LoraConfig(r=4, target_modules=["o"], init_lora_weights=False))
    MergedAdapter.replace(adapter := model.base_model.model["o"])
    return adapter


def decoder(family: str, shared: bool) -> nn.Module:
    model = tiny_model(family).bfloat16()
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    if shared:
        share_operations(model, "fp8")
    mask_unused_vocabulary(model, 60)
    return model


def tokens() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(7), torch.arange(12)])[None]
    return {"input_ids": torch.arange(19)[None], "position_ids": positions, "use_cache": False}


def call_experts(module: nn.Module) -> torch.Tensor:
    x = torch.linspace(-2, 2, 5 * 256).view(5, 256).bfloat16().requires_grad_()
    return module(x, torch.arange(10).view(5, 2) % 8, torch.full((5, 2), 0.5))


def call_attention(module: nn.Module) -> torch.Tensor:
    q, k, v = (torch.linspace(-1, bound, 9 * 128).view(9, 1, 128).bfloat16() for bound in (1, 2, 3))
    return module(q.requires_grad_(), k, v, torch.tensor([0, 4, 9], dtype=torch.int32), 5)


def call_linear(module: nn.Module) -> torch.Tensor:
    return module(torch.linspace(-2, 2, 768).view(3, 256).bfloat16().requires_grad_())


MODULES: dict[type, list[tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]]] = {
    JetLinear: [(linear, call_linear)],
    MergedAdapter: [(adapted, call_linear)],
    Factor: [(lambda: Factor(256, 4, bias=False), lambda module: module())],
    JetExperts: [(experts, call_experts)],
    AttentionCore: [(lambda: AttentionCore(0.1, formats.kv_cache("fp8")), call_attention)],
    nn.Module: [  # whole models, with the functions that this package puts into stock modules
        (lambda family=family, shared=shared: decoder(family, shared), lambda module: module(**tokens()).logits)
        for family, shared in (("qwen3", True), ("qwen3_moe", True), ("qwen2", False))
    ],
}
"""Class -> how to build one, and an output of it."""


def classes(base: type, *packages: ModuleType) -> set[type]:
    """Subclasses of ``base`` in every module of ``packages``."""
    subclasses: set[type] = set()
    for package in packages:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(info.name)).values()
            subclasses |= {value for value in values if isinstance(value, type) and issubclass(value, base)}
    return {value for value in subclasses if value.__module__.startswith("jetrl_verl.")}


def test_every_module_class_has_a_row():
    """But the rollout's, which vLLM builds in its workers and nothing copies."""
    assert classes(nn.Module, jetrl_verl.nn, jetrl_verl.train, jetrl_verl.models) == MODULES.keys() - {nn.Module}


def results(module: nn.Module, call: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    """An output and the gradients of all trained parameters."""
    module.zero_grad()
    output = call(module)
    output.float().square().sum().backward()
    return [output.detach(), *(weight.grad.clone() for weight in module.parameters() if weight.requires_grad)]


@pytest.mark.parametrize("name", [*COPIES, "state dict"])
@pytest.mark.parametrize(
    ("build", "call"),
    [pytest.param(*row, id=f"{cls.__name__} {i}") for cls, rows in MODULES.items() for i, row in enumerate(rows)],
)
def test_a_copied_module_gives_the_same_bits(build, call, name):
    torch.manual_seed(3)
    module = build()
    expected = results(module, call)  # with cached qdata, which a copy does not take along
    if name == "state dict":
        copied = build()
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        copied.load_state_dict(saved(module.state_dict(), weights_only=True))
    else:
        copied = COPIES[name](module)
    assert type(copied) is type(module) and not any(getattr(part, "holds_qdata", False) for part in copied.modules())
    assert not {id(part) for part in module.modules()} & reachable_modules(copied)
    for value, other in zip(results(copied, call), expected, strict=True):
        assert torch.equal(value, other)


def reachable_modules(module: nn.Module) -> set[int]:
    """Modules of ``module`` and of what its forwards and hooks refer to."""
    parts = set()
    for part in module.modules():
        parts.add(id(part))
        for function in (vars(part).get("forward"), *part._forward_hooks.values()):
            keywords = getattr(function, "keywords", {})
            values = [*getattr(function, "args", ()), *keywords.get("readers", ())]
            parts |= {id(value) for value in values if isinstance(value, nn.Module)}
    return parts


# --- values ----------------------------------------------------------------------------------------------------------

OPTIONS = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule="pow2")
VALUES = {
    "options": OPTIONS,
    "job": Job(OPTIONS, ("why",), rollout_ranks=2, versions={"verl": "0.9.1"}),
    "plan": plan_linears(tiny_config("qwen3_moe")),
    "family": jetrl_verl.models.family(tiny_config("qwen3_moe")),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_copied_value_is_equal(value, name):
    assert COPIES[name](value) == value


@pytest.mark.parametrize("name", COPIES)
def test_a_format_and_a_cache_stay_one_object(name):
    objects = [*map(formats.get, formats.FORMATS), *map(formats.kv_cache, formats.CACHES)]
    assert {type(value) for value in objects} == {
        cls for cls in classes((Format, KVCache), jetrl_verl.formats) if not inspect.isabstract(cls)
    }
    assert all(COPIES[name](value) is value for value in objects)


@pytest.mark.parametrize("name", COPIES)
def test_a_quantized_tensor_keeps_its_bits(name):
    made = {QuantizedTensor, QuantizedWeight}
    assert classes(QuantizedTensor, jetrl_verl.reference, jetrl_verl.formats) == made
    assert classes(torch.Tensor, jetrl_verl.reference, jetrl_verl.formats, jetrl_verl.nn, jetrl_verl.train) == set()
    x = torch.linspace(-3, 3, 128 * 256).view(128, 256).bfloat16()
    for number_format in map(formats.get, formats.FORMATS):
        weight = number_format.quantize_weight(x, number_format.traits.scale_rules[0])
        copied = COPIES[name](weight)
        assert type(copied) is QuantizedWeight and copied.format is number_format
        for value, other in zip(copied, weight, strict=True):
            assert value.dtype == other.dtype and torch.equal(value.view(torch.uint8), other.view(torch.uint8))
        assert all(torch.equal(a, b) for a, b in zip(saved(list(weight), weights_only=True), weight))

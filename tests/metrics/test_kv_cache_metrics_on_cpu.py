# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of the FP8 KV cache, compared with the data that attention quantizes and with values worked out by hand."""

import sys

import pytest
import torch
from tiny_models import tiny_model

from jetrl_verl import formats, kernels
from jetrl_verl.metrics.kv_cache import KVCacheSampler
from jetrl_verl.metrics.quantization import QuantizationMetrics
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference.kv_cache import saturated
from jetrl_verl.train.shared_operations import share_operations

TOKENS = torch.arange(3 * 100).reshape(3, 100) % 64
SHARES = ("underflow", "subnormal", "saturated")


def shared_model(kv_cache: str = "fp8", **changes):
    model = tiny_model("qwen3", **changes).to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    share_operations(model, kv_cache)
    return model


def passed(model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum()


def measured(model, tokens: torch.Tensor = TOKENS) -> dict[str, float]:
    sampler = KVCacheSampler(model)
    with sampler.sampling():
        passed(model, tokens).backward()
    assert not any(module._forward_pre_hooks for module in model.modules() if "Core" in type(module).__name__)
    return sampler.metrics()


def test_keys_and_values_are_measured_by_layer_and_together():
    metrics = measured(shared_model())
    places = {f"{tensor}{layer}" for tensor in "KV" for layer in ("", "/layer_0", "/layer_1")}
    assert metrics.keys() == {f"kv_cache/{place}/{name}" for place in places for name in (*SHARES, "snr_db")}
    for tensor in "KV":
        for name in SHARES:
            # All layers have equally many elements, none of them zero.
            layers = [metrics[f"kv_cache/{tensor}/layer_{i}/{name}"] for i in range(2)]
            assert metrics[f"kv_cache/{tensor}/{name}"] == pytest.approx(sum(layers) / 2)
        assert metrics[f"kv_cache/{tensor}/saturated"] == 0
        assert 25 < metrics[f"kv_cache/{tensor}/snr_db"] < 40


def test_a_bf16_cache_and_stock_attention_have_no_metric():
    assert measured(shared_model("bf16")) == measured(tiny_model("qwen3")) == {}


def test_at_most_four_layers_are_measured():
    metrics = measured(shared_model(num_hidden_layers=7), TOKENS[:, :8])
    layers = {name.split("/")[2] for name in metrics if "layer" in name}
    assert layers == {"layer_0", "layer_2", "layer_4", "layer_6"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_sample_is_the_data_that_attention_quantizes(monkeypatch, checkpointing):
    """Row for row, in three passes over three groups of tokens."""
    model = shared_model(num_hidden_layers=1)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own, sampled = [], []

    def recording(stock, into):
        def quantize(k, v):
            outputs = stock(k, v)
            into.append([*(outputs[0] if len(outputs) == 3 else ()), *outputs[-2:]])
            return outputs

        return quantize

    # Under checkpointing attention keeps no FP8 data. The package has a function of the module's name.
    name = "quantize_dequantize_kv" if checkpointing else "quantize_kv"
    monkeypatch.setattr(sys.modules[kernels.attention.__module__], name, recording(getattr(kernels, name), own))
    monkeypatch.setattr(kernels, "quantize_kv", recording(kernels.quantize_kv, sampled))
    sampler = KVCacheSampler(model)
    for number in range(1, 4):
        own.clear(), sampled.clear()
        with sampler.sampling():
            passed(model).backward()
        assert len(sampled) == 1 and len(own) == 1 + checkpointing
        start = number * 7919 % 3 * 128
        # qdata, scales and attention's input, or the input only.
        for part, whole in zip(sampled[0][-len(own[0]) :], own[0], strict=True):
            assert torch.equal(part.view(torch.uint8), whole[start : start + 128].view(torch.uint8))
        assert len(own[0]) == (2 if checkpointing else 6)


def test_underflow_worked_by_hand():
    """A head whose largest number is 448 has the scale 1, so 2^-10 rounds to zero and 2^-9 is subnormal."""
    model = shared_model(num_hidden_layers=1)
    sampler = KVCacheSampler(model)
    core = model.model.layers[0].self_attn.core
    k = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    k[..., :4] = torch.tensor([448.0, 2**-10, 2**-9, 1.0])
    with sampler.sampling():
        core(k.repeat(1, 2, 1), k, torch.zeros_like(k), torch.tensor([0, 4], dtype=torch.int32), 4)
    metrics = sampler.metrics()
    assert {name: metrics[f"kv_cache/K/{name}"] for name in SHARES} == {
        "underflow": 1 / 4,
        "subnormal": 1 / 4,
        "saturated": 0,
    }
    # V is zero, so nothing can be lost.
    assert not any(name.startswith("kv_cache/V") for name in metrics)


def test_a_rule_that_clips_saturates():
    """Scale 1, vLLM's default without calibration, clips values above 448."""
    values = torch.tensor([448.0, 449.0, -1000.0, 447.0, 3.0])
    qdata = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert saturated(values, qdata, qdata.float()) == 2
    # Neither rounding up to the maximum nor NaN counts.
    assert (
        saturated(
            torch.tensor([440.0, float("nan")]),
            torch.tensor([448.0, float("nan")]).to(qdata.dtype),
            torch.tensor([448.0, float("nan")]),
        )
        == 0
    )


def test_a_step_reports_them_with_bf16_linear_layers():
    model = tiny_model("qwen3").to(torch.bfloat16)
    plans = plan_linears(model.config, format_name="bf16")
    share_operations(model, "fp8")
    metrics = QuantizationMetrics(model, plans, "fp32", formats.get("fp8"))
    reported: dict[str, list[float]] = {}
    with metrics.measuring(reported):
        passed(model)
    assert reported == {}
    metrics.start_sync()
    with metrics.measuring(reported):
        passed(model)
    assert {"jetrl/kv_cache/K/saturated", "jetrl/kv_cache/V/layer_1/underflow"} < reported.keys()
    assert all(name.startswith("jetrl/kv_cache/") for name in reported)


def test_measuring_changes_nothing():
    gradients = []
    for measures in (False, True):
        model = shared_model()
        if measures:
            measured(model)
        else:
            passed(model).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())

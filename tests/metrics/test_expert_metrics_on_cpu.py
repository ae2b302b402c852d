# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization metrics of a mixture: samples are the products' operands, counted by expert."""

import pytest
import torch
from test_quantization_metrics_on_cpu import watch
from tiny_models import tiny_model

from jetrl_verl import formats, kernels
from jetrl_verl.metrics import quantization
from jetrl_verl.metrics.experts import experts_of
from jetrl_verl.metrics.quantization import CodeChanges, QuantizationSampler
from jetrl_verl.metrics.sample import tally
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.sync.quantize import quantize_stream

FP8 = formats.get("fp8")
TOKENS = torch.arange(3 * 100).reshape(3, 100) % 64
OF_EXPERTS = {f"{kind}/{tensor}" for kind in ("gate_up", "down") for tensor in ("W", "X", "dY", "dY_tokens")}
BY_EXPERT = OF_EXPERTS - {"gate_up/X"}


def mixture(replaced: bool = True, family: str = "qwen3_moe", **changes):
    model = tiny_model(family, **changes)
    plans = plan_linears(model.config)
    if replaced:
        replace_linears(model, plans, scale_rule="fp32")
    return model, plans


def measured(model, plans) -> dict[str, float]:
    sampler = QuantizationSampler(model, plans, "fp32", FP8)
    with sampler.sampling(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return sampler.metrics()


def test_every_expert_tensor_is_measured_under_names_independent_of_their_number():
    metrics = measured(*mixture())
    assert metrics.keys() == measured(*mixture(num_experts=4)).keys() == measured(*mixture(num_experts=16)).keys()
    named = {name.rpartition("/")[0] for name in metrics if name.startswith(("gate_up", "down"))}
    assert named == OF_EXPERTS
    assert {name.removesuffix("/underflow_expert_max") for name in metrics if "expert_max" in name} == BY_EXPERT
    for name in BY_EXPERT:
        # The worst expert is at least as bad as the mean.
        assert metrics[f"{name}/underflow_expert_max"] >= metrics[f"{name}/underflow"]
        # With one group, so one expert, both are equal up to FP32 rounding.
        assert metrics[f"{name}/snr_db_expert_min"] <= metrics[f"{name}/snr_db"] * (1 + 2**-22)
    for name in ("gate_up/W", "gate_up/X", "down/W", "down/X"):
        assert 20 < metrics[f"{name}/snr_db"] < 40


def test_a_shared_expert_is_measured_next_to_the_experts():
    named = {name.rpartition("/")[0] for name in measured(*mixture(family="qwen3_5_moe"))}
    assert OF_EXPERTS | {f"shared_{name}" for name in OF_EXPERTS} <= named


def test_a_bf16_trainer_measures_only_weights_and_the_experts_input():
    metrics = measured(*mixture(replaced=False))
    named = {name.rpartition("/")[0] for name in metrics if name.startswith(("gate_up", "down"))}
    assert named == {"gate_up/W", "down/W", "gate_up/X"}


def test_the_expert_that_underflows_is_the_worst_one():
    """Half of expert 5 is 2^-20 times as large as the other half: it becomes zero, 1/2 of its sample."""
    model, plans = mixture(num_hidden_layers=1, moe_intermediate_size=128)
    with torch.no_grad():
        for parameter in (model.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.down_proj):
            parameter.uniform_(1, 2)
            parameter[5, ::2] *= 2.0**-20
    metrics = measured(model, plans)
    for kind in ("gate_up", "down"):
        assert metrics[f"{kind}/W/underflow_expert_max"] == 0.5
        assert metrics[f"{kind}/W/underflow"] == 0.5 / 8


def test_samples_are_what_the_products_read(monkeypatch):
    """Every sampled row of qdata with its scales is among the module's rows of that expert."""
    model, plans = mixture(num_hidden_layers=1)
    (layer,) = experts_of(model, plans, FP8, "fp32").values()
    seen, gradients = [], []

    def record(module, args, output):
        x, chosen, weights = args
        source = getattr(x, "source", x)
        seen.append((source.detach().flatten(0, -2).bfloat16(), chosen, weights.detach()))
        output.register_hook(lambda gradient: gradients.append(gradient))

    layer.module.register_forward_hook(record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    (x, chosen, weights), (gradient,) = seen[0], gradients
    whole, inner = layer.inputs(x, chosen, weights)
    part, inner_part = layer.inputs(x[128:256], chosen[128:256], weights[128:256])
    assert torch.equal(whole.quantized.qdata.view(torch.uint8)[128:256], part.quantized.qdata.view(torch.uint8))

    def rows(sample):
        joined = torch.cat([sample.quantized.qdata.view(torch.uint8), sample.quantized.scales.view(torch.uint8)], dim=1)
        return {(owner, bytes(row.numpy())) for owner, row in zip(sample.owners.tolist(), joined, strict=True)}

    assert rows(inner_part) <= rows(inner)
    # The kernel rounds the same product: no element is off by more than half a step of E4M3.
    error = (inner.restored - inner.values.float()).abs()
    assert (error <= 2**-4 * inner.values.float().abs() + 2**-10 * inner.quantized.scales.max()).all()

    for sample in layer.gradients(chosen, 0)(gradient):
        (owner,) = set(sample.owners.tolist())
        tokens = [t for t in range(len(chosen)) if owner in chosen[t].tolist()][:128]
        expected = torch.zeros(128, 256, dtype=torch.bfloat16)
        expected[: len(tokens)] = gradient.flatten(0, -2)[tokens].bfloat16()
        assert torch.equal(sample.values, expected if sample.tensor == "dY" else expected.t())


@pytest.mark.parametrize("step", [0, 1, 5])
def test_the_gradient_of_gate_and_up_is_what_backward_quantizes(monkeypatch, step):
    """Byte for byte, in both layouts, compared with the qdata that DGrad and WGrad multiply."""
    model, plans = mixture(num_hidden_layers=1)
    (layer,) = experts_of(model, plans, FP8, "fp32").values()
    products, samples, operands = [], [], []
    own = FP8.weighted_silu_mul_backward

    def recorded(*args):
        products.append(own(*args))
        return products[-1]

    def observe(*args):
        operands.append(args)
        samples.extend(layer.gradients_of_gate_up(*args, step))

    monkeypatch.setattr(FP8, "weighted_silu_mul_backward", recorded)
    layer.module.on_backward = observe
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    ((*quantized, _),), ((_, _, _, segments),) = products, operands
    group = step * 7919 % (int(segments.start[-1]) // 128)
    rows = slice(group * 128, group * 128 + 128)
    owner = int((segments.start[1:] <= rows.start).sum())
    assert int(segments.start[-1]) > 128 * (step + 1)
    for sample, whole in zip(samples, quantized, strict=True):
        assert (sample.kind, set(sample.owners.tolist())) == ("gate_up", {owner})
        qdata = whole.qdata.view(torch.uint8)
        mine = qdata[rows] if sample.tensor == "dY" else qdata[:, rows]
        assert torch.equal(sample.quantized.qdata.view(torch.uint8), mine)
        scales = whole.scales[rows] if sample.tensor == "dY" else whole.scales[:, group : group + 1]
        assert torch.equal(sample.quantized.scales, scales)


def test_underflow_of_the_gradient_of_gate_and_up_worked_by_hand():
    """Of ``d gate = silu'(gate) up dh`` half becomes zero where up is 1 and 2^-20 in turn, of ``d up`` nothing."""
    model, plans = mixture(num_hidden_layers=1)
    (layer,) = experts_of(model, plans, FP8, "fp32").values()
    segments = kernels.segments(torch.full((128, 1), 3, dtype=torch.int32), 8, 128)
    dh, gate = torch.ones(len(segments.pair), 128).bfloat16(), torch.ones(len(segments.pair), 128)
    up = torch.ones_like(gate)
    up[:, ::2] = 2.0**-20
    gate_up = torch.cat([gate, up], dim=1).bfloat16()
    rowwise, colwise = layer.gradients_of_gate_up(dh, gate_up, torch.ones(128, 1), segments, 0)
    assert tally(FP8, rowwise.values, rowwise.quantized.qdata, rowwise.restored)[:2].tolist() == [128 * 256, 128 * 64]
    # Along tokens a group is one column of equal numbers.
    assert tally(FP8, colwise.values, colwise.quantized.qdata, colwise.restored)[1] == 0
    assert set(rowwise.owners.tolist()) == set(colwise.owners.tolist()) == {3}


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_sampled_weight_blocks_are_quantized_as_in_the_full_weight(step):
    model, plans = mixture(num_hidden_layers=1)
    (layer,) = experts_of(model, plans, FP8, "fp32").values()
    assert isinstance(layer.module, JetExperts)
    for sample, parameter in zip(layer.weights(step), (layer.module.gate_up_proj, layer.module.down_proj), strict=True):
        qdata, scales = FP8.quantize_weight(parameter.detach().bfloat16(), "fp32")
        blocks = qdata.view(torch.uint8).unfold(1, 128, 128).unfold(2, 128, 128).flatten(1, 2)
        mine = sample.quantized.qdata.view(torch.uint8).view(8, 128, 128)
        (at,) = [i for i in range(blocks.shape[1]) if torch.equal(blocks[:, i], mine)]
        assert torch.equal(scales.flatten(1)[:, at], sample.quantized.scales.flatten())


def test_load_and_idle_experts_are_counted():
    model, plans = mixture(num_hidden_layers=1)
    # Equal logits: every token goes to the same two experts.
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    metrics = measured(model, plans)
    assert metrics["experts/load_max"] == 8 / 2 and metrics["experts/idle"] == 6 / 8


def test_changed_qdata_report_the_smallest_and_largest_share_of_an_expert():
    model, plans = mixture(num_hidden_layers=1)
    changes = CodeChanges(plans)

    def sync() -> dict[str, float]:
        watch(changes, quantize_stream(model.state_dict().items(), plans, "fp32"))
        return changes.metrics()

    assert sync() == {}
    weight = model.model.layers[0].mlp.experts.down_proj
    with torch.no_grad():
        weight[3].neg_()
        zeros = int((FP8.quantize_weight(weight.bfloat16(), "fp32").qdata[3].view(torch.uint8) & 0x7F == 0).sum())
    metrics = sync()
    changed = metrics["qdata_changed/down_expert_max"]
    assert 1 - zeros / weight[3].numel() - 0.01 < changed <= 1
    assert metrics["qdata_changed/down_expert_min"] == metrics["scales_changed/down_expert_max"] == 0
    assert metrics["qdata_changed/down"] == pytest.approx(changed / 8)
    assert metrics["qdata_changed/gate_up_expert_max"] == 0


def test_the_kept_sample_of_experts_is_bounded_and_covers_every_block(monkeypatch):
    monkeypatch.setattr(quantization, "SAMPLED_OF_AN_EXPERT", 2**9)
    model, plans = mixture(num_hidden_layers=1)
    changes = CodeChanges(plans)
    sent = dict(quantize_stream(model.state_dict().items(), plans, "fp32"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    watch(changes, [(name, sent[name])])
    kept = changes._kept[name,]
    assert kept.sample.shape[0] == 8 and 2**8 < kept.sample.shape[1] <= 2**10
    columns = torch.arange(256 * 256)[:: 256 * 256 // 2**9 | 1]
    assert len({(p // 256 // 128, p % 256 // 128) for p in columns.tolist()}) == 4

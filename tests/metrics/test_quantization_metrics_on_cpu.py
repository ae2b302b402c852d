# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization metrics: by hand on small tensors, and compared with the qdata that the layers multiply."""

import math

import pytest
import torch
from streams import stacked
from tiny_models import tiny_model

from jetrl_verl import formats, kernels
from jetrl_verl.formats.block_fp8 import BlockFP8
from jetrl_verl.metrics import quantization
from jetrl_verl.metrics.quantization import CodeChanges, QuantizationSampler
from jetrl_verl.metrics.sample import SAMPLED_LAYERS, shares, tally
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import dequantize_1x128, quantize_1x128, quantize_128x128
from jetrl_verl.sync.quantize import quantize_stream

TOKENS = torch.arange(3 * 100).reshape(3, 100) % 64

FP8 = formats.get("fp8")


def jet_model(backward: str = "fp8", **changes):
    model = tiny_model("qwen3", **({"hidden_size": 128, "intermediate_size": 256} | changes))
    plans = plan_linears(model.config)
    replace_linears(model, plans, scale_rule="fp32", backward=backward)
    return model, plans


def forward(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens, use_cache=False).logits.float().logsumexp(-1)


def backward_of(model) -> None:
    forward(model, TOKENS).sum().backward()


def of_row(row: list[float]) -> dict[str, float]:
    x = torch.tensor([row])
    q = quantize_1x128(x, "fp32")
    return shares({("qkv", "X"): tally(FP8, x, q.qdata, dequantize_1x128(q))})


def test_underflow_subnormals_and_noise_of_a_row_worked_by_hand():
    """amax 448, so the scale is 1 and a value is its own quotient.

    2^-10 is half the smallest subnormal and rounds to the even neighbour, zero: it underflows. 2^-9 and 3 * 2^-9 are
    subnormal and exact, 2^-6 is the smallest normal number. Zeros do not count, so 5 of 128 elements do. The noise is
    the lost 2^-10.
    """
    metrics = of_row([448.0, 2**-10, 2**-9, 3 * 2**-9, 2**-6] + [0.0] * 123)
    assert metrics["qkv/X/underflow"] == 1 / 5
    assert metrics["qkv/X/subnormal"] == 2 / 5
    signal = 448.0**2 + 2**-20 + 2**-18 + 9 * 2**-18 + 2**-12
    assert metrics["qkv/X/snr_db"] == pytest.approx(10 * math.log10(signal / 2**-20), rel=1e-6)


def test_an_exact_row_has_no_signal_to_noise_ratio_and_a_zero_row_no_metric():
    assert of_row([448.0, 1.0, -2.0]) == {"qkv/X/underflow": 0.0, "qkv/X/subnormal": 0.0}
    assert of_row([0.0] * 128) == {}


def test_nan_is_not_a_finite_ratio():
    metrics = of_row([1.0, float("nan")] + [0.5] * 126)
    assert math.isnan(metrics["qkv/X/snr_db"])
    assert metrics["qkv/X/underflow"] == 0.0


def test_tallies_add_up_over_samples():
    """1 of 1 and 0 of 3 give 1 of 4, not a mean of shares."""
    first = tally(FP8, torch.tensor([1.0]), torch.zeros(1, dtype=torch.uint8), torch.zeros(1))
    second = tally(FP8, torch.ones(3), torch.full((3,), 0x38, dtype=torch.uint8), torch.ones(3))
    assert shares({("o", "W"): first + second})["o/W/underflow"] == 1 / 4


def test_every_kind_and_tensor_of_a_training_pass_is_measured():
    model, plans = jet_model()
    sampler = QuantizationSampler(model, plans, "fp32", FP8)
    with sampler.sampling():
        backward_of(model)
    metrics = sampler.metrics()
    kinds, tensors = ("qkv", "o", "gate_up", "down"), ("X", "dY", "W", "dY_tokens")
    assert {f"{k}/{t}/{m}" for k in kinds for t in tensors for m in ("underflow", "subnormal", "snr_db")} == set(
        metrics
    )
    assert all(0 <= value <= 1 for name, value in metrics.items() if not name.endswith("snr_db"))
    # E4M3 with a scale per group: 3 mantissa bits give 25 to 35 dB on data without outliers.
    assert all(20 < metrics[f"{kind}/{tensor}/snr_db"] < 40 for kind in kinds for tensor in ("X", "W"))


def test_sampled_qdata_are_rows_of_the_layers_qdata(monkeypatch):
    """A group of 128 rows is quantized as in the full tensor."""
    model, plans = jet_model()
    own, sampled = {}, []
    stock = kernels.quantize_1x128

    def layers_own(x, rule):
        q = stock(x, rule)
        own[len(own)] = q
        return q

    class SamplersOwn(BlockFP8):
        def quantize_activation(self, x, rule):
            q = stock(x, rule)
            sampled.append(q)
            return q

    monkeypatch.setattr(kernels, "quantize_1x128", layers_own)
    sampler = QuantizationSampler(model, plans, "fp32", SamplersOwn())
    for _ in range(3):  # each pass takes another group; 300 rows have three, the last one of 44
        sampled.clear(), own.clear()
        with sampler.sampling():
            forward(model, TOKENS)
        start = sampler._passes * 7919 % 3 * 128
        measured = list(own.values())  # q and k and v, o, gate and up, down of each layer
        for part, whole in zip(sampled, measured, strict=True):
            rows = slice(start, min(start + 128, 300))
            assert torch.equal(part.qdata.view(torch.uint8), whole.qdata[rows].view(torch.uint8))
            assert torch.equal(part.scales, whole.scales[rows])


def test_measuring_changes_nothing():
    gradients = []
    for measured in (False, True):
        model, plans = jet_model()
        sampler = QuantizationSampler(model, plans, "fp32", FP8)
        torch.manual_seed(5)
        if measured:
            with sampler.sampling():
                backward_of(model)
        else:
            backward_of(model)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        state = torch.get_rng_state()
        assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Linear))
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_counted_once(reentrant):
    measured = []
    for checkpointing in (False, True):
        model, plans = jet_model()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        sampler = QuantizationSampler(model, plans, "fp32", FP8)
        with sampler.sampling():
            backward_of(model)
        measured.append(sampler.metrics())
    assert measured[0] == measured[1]


def test_only_the_first_micro_batch_is_measured():
    model, plans = jet_model()
    sampler = QuantizationSampler(model, plans, "fp32", FP8)
    with sampler.sampling():
        backward_of(model)
        first = sampler.metrics()
        backward_of(model)
    assert sampler.metrics() == first


def test_a_bf16_backward_reports_no_gradient():
    for model, plans in (jet_model("bf16"), (tiny_model("qwen3"), plan_linears(tiny_model("qwen3").config))):
        sampler = QuantizationSampler(model, plans, "fp32", FP8)
        with sampler.sampling():
            backward_of(model)
        assert {name.split("/")[1] for name in sampler.metrics()} == {"X", "W"}


def test_sampled_layers_are_spread_from_first_to_last():
    model, plans = jet_model(num_hidden_layers=9)
    layers = QuantizationSampler(model, plans, "fp32", FP8)._layers
    assert len(layers) == 7 * SAMPLED_LAYERS
    names = {id(module): name for name, module in model.named_modules()}
    assert sorted({int(names[id(layer)].split(".")[2]) for _, layer in layers}) == [0, 3, 5, 8]


def test_a_compiled_layer_runs_and_is_not_measured():
    model, plans = jet_model()
    sampler = QuantizationSampler(model, plans, "fp32", FP8)
    compiled = torch.compile(model.model.layers[0].mlp.down_proj, backend="eager")
    x = torch.randn(4, 256)
    with sampler.sampling(), torch.no_grad():
        y = compiled(x)
    assert torch.equal(y, model.model.layers[0].mlp.down_proj(x).detach())
    assert sampler.metrics() == {}


def test_the_work_does_not_grow_with_the_batch(monkeypatch):
    model, plans = jet_model()
    elements = []
    monkeypatch.setattr(quantization, "tally", lambda _, values, *__: elements.append(values.numel()) or torch.zeros(5))
    sampler = QuantizationSampler(model, plans, "fp32", FP8)
    counts = []
    for sequences in (2, 20):
        elements.clear()
        with sampler.sampling():
            forward(model, torch.zeros(sequences, 128, dtype=torch.long)).sum().backward()
        counts.append(sum(elements))
    assert (
        counts[0]
        == counts[1]
        == sum(
            128 * ((kind_reads_x * layer.in_features) + layer.in_features + 2 * layer.out_features)
            for kind_reads_x, layer in ((id(layer) in sampler._reads_x, layer) for _, layer in sampler._layers)
        )
    )


def stream_of(model, plans):
    return quantize_stream(model.state_dict().items(), plans, "fp32")


def watch(changes: CodeChanges, stream) -> None:
    """A sync of these weights."""
    changes.start_sync()
    for item in stream:
        changes.add(*item)


def test_changed_qdata_are_counted_per_kind():
    """One input column, 128 of 128 x 256 down_proj qdata, is negated; no scale changes."""
    model, plans = jet_model(num_hidden_layers=1)
    changes = CodeChanges(plans)
    watch(changes, stream_of(model, plans))
    assert changes.metrics() == {}, "the first sync has nothing to compare with"
    with torch.no_grad():
        weight = model.model.layers[0].mlp.down_proj.weight
        weight[:, 7] = -weight[:, 7]
        zeros = int((quantize_128x128(weight.bfloat16(), "fp32").qdata[:, 7].view(torch.uint8) & 0x7F == 0).sum())
    watch(changes, stream_of(model, plans))
    metrics = changes.metrics()
    assert metrics["qdata_changed/down"] == (128 - zeros) / (128 * 256)
    assert metrics["scales_changed/down"] == 0.0
    assert metrics["qdata_changed/qkv"] == metrics["qdata_changed/gate_up"] == metrics["qdata_changed/o"] == 0.0


def test_an_update_below_fp8_precision_hardly_changes_qdata():
    model, plans = jet_model(num_hidden_layers=1)
    changes = CodeChanges(plans)
    watch(changes, stream_of(model, plans))
    changes.metrics()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6)
    watch(changes, stream_of(model, plans))
    assert max(value for name, value in changes.metrics().items() if name.startswith("qdata")) < 1e-3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    watch(changes, stream_of(model, plans))
    assert min(value for name, value in changes.metrics().items() if name.startswith("qdata")) > 0.5


def test_a_repeated_sync_does_not_hide_an_update():
    """verl's validation syncs again after a colocated reward model replaced the rollout."""
    model, plans = jet_model(num_hidden_layers=1)
    once, again = CodeChanges(plans), CodeChanges(plans)
    for _ in range(3):
        watch(once, stream_of(model, plans))
        for _ in range(2):
            watch(again, stream_of(model, plans))
        expected = once.metrics()
        assert again.metrics() == expected
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    assert min(value for name, value in expected.items() if name.startswith("qdata")) > 0.5


def test_the_kept_sample_of_a_weight_is_bounded_and_covers_all_blocks(monkeypatch):
    monkeypatch.setattr(quantization, "SAMPLED_QDATA", 2**10)
    model, plans = jet_model(num_hidden_layers=1)
    changes = CodeChanges(plans)
    weights = {name: t for name, t in stream_of(model, plans) if name.endswith("down_proj.weight")}
    ((name, weight),) = weights.items()
    watch(changes, weights.items())
    kept, qdata = changes._kept[name,], weight.qdata
    assert 2**9 < kept.sample.numel() <= 2**10
    positions = torch.arange(qdata.numel()).view(qdata.shape).flatten()[:: qdata.numel() // 2**10 | 1]
    assert len({(p // 256 // 128, p % 256 // 128) for p in positions.tolist()}) == 2
    assert len({p % 256 for p in positions.tolist()}) == 256


@pytest.mark.parametrize("sampled", [2**16, 2**10])
def test_changes_in_a_stack_are_counted_per_kind(monkeypatch, sampled):
    monkeypatch.setattr(quantization, "SAMPLED_QDATA", sampled)
    model, plans = jet_model(num_hidden_layers=2)
    in_stacks, alone = CodeChanges(plans), CodeChanges(plans)
    for step in range(2):
        watch(in_stacks, quantize_stream(stacked(model), plans, "fp32"))
        watch(alone, stream_of(model, plans))
        stacks, expected = in_stacks.metrics(), alone.metrics()
        if step == 0:
            for name, parameter in model.named_parameters():
                if name.endswith(("v_proj.weight", "down_proj.weight")):
                    parameter.data.add_(torch.randn_like(parameter))
    assert stacks.keys() == expected.keys() and expected["qdata_changed/qkv"] > 0.1
    assert all(stacks[f"{what}_changed/{kind}"] == 0 for what in ("qdata", "scales") for kind in ("o", "gate_up"))
    for name in expected:
        assert stacks[name] == pytest.approx(expected[name], abs=0 if sampled == 2**16 else 0.1)


def test_fsdp2_gives_the_metrics_of_the_plain_model(one_process_group):
    """The sampler is built before FSDP wraps the model; a running layer has the gathered BF16 weight."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    measured = []
    for sharded in (False, True):
        model, plans = jet_model()
        sampler = QuantizationSampler(model, plans, "fp32", FP8)
        if sharded:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        else:
            for parameter in model.parameters():  # not .to(): the rotary table is a buffer and stays FP32
                parameter.data = parameter.data.to(torch.bfloat16)
        with sampler.sampling():
            backward_of(model)
        measured.append(sampler.metrics())
    assert measured[0] == measured[1] and len(measured[0]) == 48

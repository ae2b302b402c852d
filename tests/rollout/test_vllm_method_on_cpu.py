# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU with verl's real sender: loading, equality with the trainer, the contract check. One
engine of each format with Qwen2, which has biases on q, k and v, runs the whole module."""

import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
import vllm_engine
from streams import parts_of_model
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel
from vllm_engine import sync

from jetrl_verl import formats, kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.sync.statement import ContractViolation, Manifest
from jetrl_verl.sync.wire import Kind, SyncStatistics, packed

RULE = "fp32"


OPTIONS = {
    "fp8": JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE),
    "int8": JetConfig("int8_rollout", train="bf16", rollout="int8"),
}
"""Format -> a job whose rollout has it."""


def build_trainer(seed: int) -> PreTrainedModel:
    return tiny_model("qwen2", seed, vocab_size=96)


@pytest.fixture(scope="module", params=OPTIONS)
def engine(request, tmp_path_factory, cpu_platform):
    """(vLLM, its worker, the format of its linear layers)."""
    folder = tmp_path_factory.mktemp("model")
    build_trainer(0).to(torch.bfloat16).save_pretrained(folder)
    with vllm_engine.cpu_settings():
        yield *vllm_engine.start(folder, OPTIONS[request.param], load_format="dummy"), request.param


of_fp8 = pytest.mark.parametrize("engine", ["fp8"], indirect=True)


def stream(model, linears: str = "fp8", *, edit=None, rule: str = RULE, **changes):
    """The parts of the trainer's sync; ``edit`` changes the finished list."""
    parts = list(parts_of_model(model, linears, rule=rule, **changes))
    return edit(parts) if edit else parts


class Int8Linear(nn.Linear):
    """The trainer's linear with the rollout's arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.fprop_int8(x, *kernels.quantize_int8(self.weight), self.bias)


def with_linears(model: PreTrainedModel, number_format: str) -> PreTrainedModel:
    """In BF16, with products of a format."""
    model.to(torch.bfloat16)
    if number_format == "fp8":
        replace_linears(model, plan_linears(model.config), scale_rule=RULE)
    for name, module in model.named_modules():
        if number_format == "int8" and name.endswith("_proj"):
            module.__class__ = Int8Linear
    return model


def test_every_sync_loads_qdata_in_place(engine):
    _, worker, linears = engine
    live, number_format = worker.model_runner.model, formats.get(linears)
    addresses = {name: parameter.data_ptr() for name, parameter in live.named_parameters()}
    for seed in (1, 2):
        model = build_trainer(seed)
        sync(worker, stream(model, linears))
        for layer, pieces in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            block, merged = model.model.layers[1], live.get_submodule(f"model.layers.1.{layer}")
            parts = [block.get_submodule(f"{layer.partition('.')[0]}.{piece}_proj").weight.detach() for piece in pieces]
            qdata, scales = number_format.quantize_weight(torch.cat(parts).bfloat16(), RULE)
            assert torch.equal(merged.weight.view(torch.uint8), qdata.view(torch.uint8))
            assert torch.equal(merged.weight_scale_inv, scales)
    statistics = SyncStatistics()
    assert list(packed(stream(model, linears), statistics)) and statistics.seconds > 0
    elements = sum(p.numel() for n, p in model.named_parameters() if "proj.weight" in n)
    assert elements < statistics.bytes < 2 * sum(p.numel() for p in model.parameters())
    # A captured CUDA graph would still read the right storage.
    assert addresses == {name: parameter.data_ptr() for name, parameter in live.named_parameters()}


def test_the_rollout_is_closer_to_the_quantized_trainer_than_to_the_bf16_one(engine):
    llm, worker, linears = engine

    def policy() -> PreTrainedModel:
        """With an input feature whose weights are 30 times as large under INT8, whose step grows with it, as BF16's
        does not. Otherwise its error is no larger than the difference between BF16 implementations."""
        model = build_trainer(2)
        for name, parameter in model.named_parameters():
            if linears == "int8" and name.endswith("proj.weight"):
                parameter.data[:, 0] *= 30
        return model

    sync(worker, stream(policy(), linears))
    prompt = torch.randint(0, 96, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    rollout = vllm_engine.prompt_log_probs(llm, prompt)

    def error(number_format: str) -> torch.Tensor:
        trainer = vllm_engine.model_log_probs(with_linears(policy(), number_format), prompt)
        return (rollout - trainer).square().mean()

    assert error(linears) < error("bf16") / 2


def test_live_layers_equal_the_trainers_in_every_bit(engine):
    """Merged qkv with bias, merged gate_up and down against the trainer's modules."""
    _, worker, linears = engine
    sync(worker, stream(build_trainer(3), linears))
    model = with_linears(build_trainer(3), linears)
    live, trained = worker.model_runner.model.model.layers[1], model.model.layers[1]
    x = torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        attention = trained.self_attn
        qkv = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1)
        assert torch.equal(live.self_attn.qkv_proj(x)[0], qkv)
        gate_up = torch.cat([trained.mlp.gate_proj(x), trained.mlp.up_proj(x)], dim=-1)
        assert torch.equal(live.mlp.gate_up_proj(x)[0], gate_up)
        h = torch.randn(5, 384).bfloat16()
        assert torch.equal(live.mlp.down_proj(h)[0], trained.mlp.down_proj(h))
    assert isinstance(attention.q_proj, JetLinear if linears == "fp8" else Int8Linear)


def tamper(name: str, change, kind: Kind = Kind.WEIGHT):
    """Edit one tensor after its sums were taken, as a faulty wire or loader would."""

    def edit(parts):
        assert (name, kind) in {(part.name, part.kind) for part in parts}, name
        return [
            part._replace(tensor=change(part.tensor.clone())) if (part.name, part.kind) == (name, kind) else part
            for part in parts
        ]

    return edit


def flip_one_byte(qdata: torch.Tensor) -> torch.Tensor:
    qdata.view(torch.uint8)[130, 7] ^= 1
    return qdata


def swap_k_and_v_bias(parts):
    """k's bias in v's place, as in a wrong merge order."""
    k, v = ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias")
    return [part._replace(name={k: v, v: k}.get(part.name, part.name)) for part in parts]


def edit_manifest(change):
    def edit(parts):
        manifest = Manifest.from_tensor(parts[-1].tensor)
        change(manifest)
        return [*parts[:-1], parts[-1]._replace(tensor=manifest.to_tensor())]

    return edit


def widen_q(parts):
    """A trainer with wider heads than vLLM's, whose loader would silently take the first rows."""
    name, (sums, manifest) = "model.layers.0.self_attn.q_proj.weight", (part.tensor for part in parts[-2:])
    manifest = Manifest.from_tensor(manifest)
    places = {weight: indices for weight, _, indices in manifest.places()}[name].flatten()
    end = int(places[-1]) + 1
    wide = torch.cat([sums[:end], sums[places], sums[end:]])
    at = next(i for i, weight in enumerate(manifest.weights) if weight.name == name)
    rows, columns = manifest.weights[at].shape
    manifest.weights[at] = manifest.weights[at]._replace(shape=(2 * rows, columns))
    return [*parts[:-2], parts[-2]._replace(tensor=wide), parts[-1]._replace(tensor=manifest.to_tensor())]


def forget_bias(parts):
    """A bias that is not sent keeps vLLM's initial values."""
    model = build_trainer(4)
    others = [item for item in model.state_dict().items() if item[0] != "model.layers.1.self_attn.q_proj.bias"]
    return list(parts_of_model(model, weights=others))


DIFFERENCES = {
    "byte": (
        tamper("model.layers.0.self_attn.q_proj.weight", flip_one_byte),
        r"layers\.0\.self_attn\.q_proj\.weight differs .* 1 of \d+ blocks .*\(1, 0\): sum .*0x\w+ in the trainer",
    ),
    "scale": (
        tamper("model.layers.1.mlp.down_proj.weight", lambda scales: scales * 2, Kind.SCALES),
        r"layers\.1\.mlp\.down_proj\.weight differs",
    ),
    "bias-order": (swap_k_and_v_bias, r"layers\.0\.self_attn\.k_proj\.bias differs"),
    "norm": (tamper("model.norm.weight", lambda norm: norm + 1), r"model\.norm\.weight differs"),
    "embedding": (tamper("model.embed_tokens.weight", lambda w: w.roll(1, 0)), r"model\.embed_tokens\.weight differs"),
    "probe": (edit_manifest(lambda manifest: setattr(manifest, "probe", 7)), "probe GEMM gives 0x7 in the trainer"),
    "no-manifest": (lambda parts: parts[:-1], "the trainer sent no statement"),
    "no-sums": (lambda parts: [*parts[:-2], parts[-1]], r"0 of the trainer's \d+ sums arrived"),
    "unsent": (forget_bias, r"layers\.1\.self_attn\.q_proj\.bias is a parameter of the rollout that the trainer did"),
    "shape": (widen_q, r"0\.self_attn\.q_proj\.weight has \(4, 2\) blocks or rows in the trainer and \(2, 2\)"),
}


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*(("fp8", kind) for kind in DIFFERENCES), ("int8", "byte"), ("int8", "scale"), ("int8", "probe")],
    indirect=["engine"],
)
def test_each_kind_of_difference_is_refused(engine, kind):
    _, worker, linears = engine
    edit, message = DIFFERENCES[kind]
    with pytest.raises(ContractViolation, match=message):
        sync(worker, stream(build_trainer(4), linears, edit=edit))


@of_fp8
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.05),
            "eps of model.layers.1.input_layernorm is 0.05 in the trainer and 1e-06 in the rollout",
        ),
        (
            lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
            "the scale of model.layers.0.self_attn is 0.5 in the trainer and 0.0",
        ),
        (
            lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
            "the activation of model.layers.0 is Tanh in the trainer and silu in the rollout",
        ),
        (lambda model: model.config.rope_parameters.update(rope_theta=5.0), "'rope_theta': 5.0"),
        (lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight), "embeddings is True in"),
        (lambda model: mask_unused_vocabulary(model, 96, [7]), "masked tokens is [7] in the trainer and [] in the"),
        (lambda model: mask_unused_vocabulary(model, 90), "with a token is 90 in the trainer and 96 in the rollout"),
    ],
    ids=["eps", "scale", "activation", "rotary", "tie", "mask", "vocabulary"],
)
def test_what_decides_a_forward_besides_weights_is_the_same(engine, change, message):
    model = build_trainer(4)
    change(model)
    with pytest.raises(ContractViolation, match=f"^contract check: .*{re.escape(message)}.*: they compute different"):
        sync(engine[1], stream(model))


@of_fp8
@pytest.mark.parametrize(
    ("owner", "attribute", "value", "message"),
    [
        (*("model_runner.model.model.norm", "variance_epsilon", 0.05), "eps of model.norm is 1e-06 in the trainer and"),
        ("", "_jetrl_vocabulary", (96, [7]), "masked tokens is [] in the trainer and [7]"),
    ],
    ids=["eps", "mask"],
)
def test_what_is_changed_in_the_rollout_alone_is_refused(engine, monkeypatch, owner, attribute, value, message):
    _, worker, _ = engine
    sync(worker, stream(build_trainer(4)))
    for name in ("_jetrl_live", "_jetrl_constants"):  # as before the first sync
        monkeypatch.setattr(worker, name, None)
    monkeypatch.setattr(attrgetter(owner)(worker) if owner else worker, attribute, value)
    with pytest.raises(ContractViolation, match=re.escape(message)):
        sync(worker, stream(build_trainer(4)))


@of_fp8
def test_a_trainer_with_another_scale_rule_is_refused(engine):
    _, worker, _ = engine
    with pytest.raises(ContractViolation, match="has scale rule pow2, the rollout fp32"):
        sync(worker, stream(build_trainer(4), rule="pow2"))


@of_fp8
def test_a_layer_in_bf16_in_the_trainer_alone_is_refused(engine):
    """vLLM's loader silently casts its BF16 weight into the qdata."""
    _, worker, _ = engine
    model = build_trainer(4)
    plans = plan_linears(model.config)
    plans["mlp.down_proj"] = replace(plans["mlp.down_proj"], format_name=formats.UNQUANTIZED)
    with pytest.raises(ContractViolation, match=r"mlp\.down_proj\.weight is BF16 in the trainer and FP8 in the roll"):
        sync(worker, stream(model, plans=plans))


@of_fp8
def test_a_loaders_error_is_raised_and_the_next_sync_works(engine):
    _, worker, _ = engine

    wrong_shape = tamper("model.layers.0.mlp.up_proj.weight", lambda qdata: qdata[:128])
    with pytest.raises(RuntimeError, match=r"start \(0\) \+ length \(384\) exceeds dimension size \(128\)"):
        sync(worker, stream(build_trainer(6), edit=wrong_shape))
    sync(worker, stream(build_trainer(6)))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU with verl's real sender: loading, equality with the trainer, the contract check. One
engine with Qwen2, which has biases on q, k and v, runs the whole module."""

import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
import vllm_engine
from tiny_models import tiny_model
from transformers import PreTrainedModel
from vllm_engine import sync

from jetrl_verl import formats
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.sync.statement import ContractViolation, Manifest, Statement
from jetrl_verl.sync.wire import Kind, SyncStatistics, packed
from jetrl_verl.train.weight_stream import stated_constants, sync_parts

RULE = "fp32"


def build_trainer(seed: int) -> PreTrainedModel:
    return tiny_model("qwen2", seed, vocab_size=96)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, cpu_platform):
    """(vLLM, its worker)."""
    folder = tmp_path_factory.mktemp("model")
    build_trainer(0).to(torch.bfloat16).save_pretrained(folder)
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule=RULE)
    with vllm_engine.cpu_settings():
        yield vllm_engine.start(folder, options, load_format="dummy")


def facts(rule: str = RULE) -> dict:
    return dict(scale_rule=rule, probe=formats.get("fp8").probe(torch.device("cpu"), rule))


def quantized(model, rule: str = RULE, plans=None):
    return quantize_stream(model.state_dict().items(), plans or plan_linears(model.config), rule)


def stream(model, *, edit=None, rule: str = RULE, plans=None):
    """The parts of the trainer's sync; ``edit`` changes the finished list."""
    statement = Statement(**facts(rule), constants=stated_constants(model))
    parts = list(sync_parts(quantized(model, rule, plans), statement))
    return edit(parts) if edit else parts


def test_a_sync_loads_qdata_in_place_and_the_contract_holds(engine):
    llm, worker = engine
    model = build_trainer(1)
    addresses = {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}
    sync(worker, stream(model))
    statistics = SyncStatistics()
    assert list(packed(stream(model), statistics)) and statistics.seconds > 0
    elements = sum(p.numel() for n, p in model.named_parameters() if "proj.weight" in n)
    assert elements < statistics.bytes < 2 * sum(p.numel() for p in model.parameters())
    # A captured CUDA graph would still read the right storage.
    assert addresses == {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}


def test_the_rollout_is_closer_to_the_fp8_trainer_than_to_the_bf16_one(engine):
    llm, worker = engine
    model = build_trainer(2)
    sync(worker, stream(model))
    prompt = torch.randint(0, 96, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    rollout = vllm_engine.prompt_log_probs(llm, prompt)

    def trainer(candidate) -> torch.Tensor:
        with torch.no_grad():
            logits = candidate(torch.tensor([prompt])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    bf16 = build_trainer(2).to(torch.bfloat16)
    fp8 = build_trainer(2).to(torch.bfloat16)
    replace_linears(fp8, plan_linears(fp8.config), scale_rule=RULE)
    assert (rollout - trainer(fp8)).square().mean() < (rollout - trainer(bf16)).square().mean() / 2


def test_live_layers_equal_the_trainers_in_every_bit(engine):
    """Merged qkv with bias, merged gate_up and down against the trainer's modules."""
    _, worker = engine
    model = build_trainer(3).to(torch.bfloat16)
    replace_linears(model, plan_linears(model.config), scale_rule=RULE)
    sync(worker, stream(model))
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
    assert isinstance(attention.q_proj, JetLinear)


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
    name = "model.layers.1.self_attn.q_proj.bias"
    model = build_trainer(4)
    others = [item for item in quantized(model) if item[0] != name]
    return list(sync_parts(others, Statement(**facts(), constants=stated_constants(model))))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            tamper("model.layers.0.self_attn.q_proj.weight", flip_one_byte),
            r"layers\.0\.self_attn\.q_proj\.weight differs .* 1 of \d+ blocks .*\(1, 0\): sum .*0x\w+ in the trainer",
        ),
        (
            tamper("model.layers.1.mlp.down_proj.weight", lambda scales: scales * 2, Kind.SCALES),
            r"layers\.1\.mlp\.down_proj\.weight differs",
        ),
        (swap_k_and_v_bias, r"layers\.0\.self_attn\.k_proj\.bias differs"),
        (tamper("model.norm.weight", lambda norm: norm + 1), r"model\.norm\.weight differs"),
        (tamper("model.embed_tokens.weight", lambda w: w.roll(1, 0)), r"model\.embed_tokens\.weight differs"),
        (edit_manifest(lambda manifest: setattr(manifest, "probe", 7)), "probe GEMM gives 0x7 in the trainer"),
        (lambda parts: parts[:-1], "the trainer sent no statement"),
        (lambda parts: [*parts[:-2], parts[-1]], r"0 of the trainer's \d+ sums arrived"),
        (forget_bias, r"layers\.1\.self_attn\.q_proj\.bias is a parameter of the rollout that the trainer did not"),
        (widen_q, r"layers\.0\.self_attn\.q_proj\.weight has \(4, 2\) blocks or rows in the trainer and \(2, 2\)"),
    ],
    ids=["byte", "scale", "bias-order", "norm", "embedding", "probe", "no-manifest", "no-sums", "unsent", "shape"],
)
def test_each_kind_of_difference_is_refused(engine, edit, message):
    _, worker = engine
    with pytest.raises(ContractViolation, match=message):
        sync(worker, stream(build_trainer(4), edit=edit))


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


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "message"),
    [
        (
            "model_runner.model.model.norm",
            "variance_epsilon",
            0.05,
            "eps of model.norm is 1e-06 in the trainer and 0.05",
        ),
        ("", "_jetrl_vocabulary", (96, [7]), "masked tokens is [] in the trainer and [7]"),
    ],
    ids=["eps", "mask"],
)
def test_what_is_changed_in_the_rollout_alone_is_refused(engine, monkeypatch, owner, attribute, value, message):
    _, worker = engine
    sync(worker, stream(build_trainer(4)))
    for name in ("_jetrl_live", "_jetrl_constants"):  # as before the first sync
        monkeypatch.setattr(worker, name, None)
    monkeypatch.setattr(attrgetter(owner)(worker) if owner else worker, attribute, value)
    with pytest.raises(ContractViolation, match=re.escape(message)):
        sync(worker, stream(build_trainer(4)))


def test_a_trainer_with_another_scale_rule_is_refused(engine):
    _, worker = engine
    with pytest.raises(ContractViolation, match="has scale rule pow2, the rollout fp32"):
        sync(worker, stream(build_trainer(4), rule="pow2"))


def test_a_layer_in_bf16_in_the_trainer_alone_is_refused(engine):
    """vLLM's loader silently casts its BF16 weight into the qdata."""
    _, worker = engine
    model = build_trainer(4)
    plans = plan_linears(model.config)
    plans["mlp.down_proj"] = replace(plans["mlp.down_proj"], format_name=formats.UNQUANTIZED)
    with pytest.raises(ContractViolation, match=r"mlp\.down_proj\.weight is BF16 in the trainer and FP8 in the roll"):
        sync(worker, stream(model, plans=plans))


def test_a_loaders_error_is_raised_and_the_next_sync_works(engine):
    _, worker = engine

    wrong_shape = tamper("model.layers.0.mlp.up_proj.weight", lambda qdata: qdata[:128])
    with pytest.raises(RuntimeError, match=r"start \(0\) \+ length \(384\) exceeds dimension size \(128\)"):
        sync(worker, stream(build_trainer(6), edit=wrong_shape))
    sync(worker, stream(build_trainer(6)))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU with verl's real sender: loading, equality with the trainer, the contract check. One
engine with Qwen2, which has biases on q, k and v, runs the whole module."""

from dataclasses import replace

import pytest
import torch
import vllm_engine
from tiny_models import tiny_model
from transformers import PreTrainedModel
from vllm_engine import sync

from jetrl_verl import formats
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.rollout.live import live_tensors
from jetrl_verl.sync.contract import SUM_PREFIX, ContractReceiver, ContractViolation, Manifest, with_contract
from jetrl_verl.sync.wire import SyncStatistics, as_tensors, counted_stock, measured, quantize_stream

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


def stream(model, *, edit=None, rule: str = RULE, plans=None, statistics: SyncStatistics | None = None):
    """The trainer's stream; ``edit`` changes its finished list of (name, tensor)."""
    statistics = statistics if statistics is not None else SyncStatistics()
    plans = plans or plan_linears(model.config)
    weights = quantize_stream(counted_stock(model.state_dict().items(), statistics), plans, rule)
    items = with_contract(weights, scale_rule=rule, probe=formats.get("fp8").probe(torch.device("cpu"), rule))
    tensors = as_tensors(items)
    return measured(edit(list(tensors)) if edit else tensors, statistics)


def test_a_sync_loads_qdata_in_place_and_the_contract_holds(engine):
    llm, worker = engine
    model = build_trainer(1)
    addresses = {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}
    statistics = SyncStatistics()
    sync(worker, stream(model, statistics=statistics))
    quantized = sum(p.numel() for n, p in model.named_parameters() if "proj.weight" in n)
    assert statistics.stock_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert quantized < statistics.bytes < statistics.stock_bytes / 2
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


def tamper(name: str, change):
    """Edit one tensor after its sums were taken, as a faulty wire or loader would."""

    def edit(items):
        assert name in dict(items), name
        return [(n, change(t.clone()) if n == name else t) for n, t in items]

    return edit


def flip_one_byte(qdata: torch.Tensor) -> torch.Tensor:
    qdata.view(torch.uint8)[130, 7] ^= 1
    return qdata


def swap_k_and_v_bias(items):
    """k's bias in v's place, as in a wrong merge order."""
    k, v = ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias")
    by_name = dict(items)
    return [(n, by_name[v] if n == k else by_name[k] if n == v else t) for n, t in items]


def edit_manifest(change):
    def edit(items):
        name, tensor = items[-1]
        manifest = Manifest.from_tensor(tensor)
        change(manifest)
        return [*items[:-1], (name, manifest.to_tensor())]

    return edit


def widen_q(items):
    """A trainer with wider heads than vLLM's, whose loader would silently take the first rows."""
    name = SUM_PREFIX + "model.layers.0.self_attn.q_proj.weight"
    return [(n, torch.cat([t, t]) if n == name else t) for n, t in items]


def forget_bias(items):
    """A bias that is not sent keeps vLLM's initial values."""
    name = "model.layers.1.self_attn.q_proj.bias"
    others = [(n, t) for n, t in items if n not in (name, SUM_PREFIX + name)]
    return edit_manifest(lambda manifest: manifest.plain.remove(name))(others)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            tamper("model.layers.0.self_attn.q_proj.weight", flip_one_byte),
            r"layers\.0\.self_attn\.q_proj\.weight differs .* 1 of \d+ blocks .*\(1, 0\): sum .*0x\w+ in the trainer",
        ),
        (
            tamper("model.layers.1.mlp.down_proj.weight_scale_inv", lambda scale: scale * 2),
            r"layers\.1\.mlp\.down_proj\.weight differs",
        ),
        (swap_k_and_v_bias, r"layers\.0\.self_attn\.k_proj\.bias differs"),
        (tamper("model.norm.weight", lambda norm: norm + 1), r"model\.norm\.weight differs"),
        (tamper("model.embed_tokens.weight", lambda w: w.roll(1, 0)), r"model\.embed_tokens\.weight differs"),
        (edit_manifest(lambda manifest: setattr(manifest, "probe", 7)), "probe GEMM gives 0x7 in the trainer"),
        (lambda items: items[:-1], "the trainer sent no statement"),
        (forget_bias, r"layers\.1\.self_attn\.q_proj\.bias is a parameter of the rollout that the trainer did not"),
        (widen_q, r"layers\.0\.self_attn\.q_proj\.weight has \(4, 2\) blocks or rows in the trainer and \(2, 2\)"),
    ],
    ids=["byte", "scale", "bias-order", "norm", "embedding", "probe", "no-manifest", "unsent", "shape"],
)
def test_each_kind_of_difference_is_refused(engine, edit, message):
    _, worker = engine
    with pytest.raises(ContractViolation, match=message):
        sync(worker, stream(build_trainer(4), edit=edit))


def test_a_trainer_with_another_scale_rule_is_refused(engine):
    _, worker = engine
    with pytest.raises(ContractViolation, match="blocks and scale rule pow2, the rollout with 128x128 and fp32"):
        sync(worker, stream(build_trainer(4), rule="pow2"))


def test_a_layer_in_bf16_in_the_trainer_alone_is_refused(engine):
    """vLLM's loader silently casts its BF16 weight into the qdata."""
    _, worker = engine
    model = build_trainer(4)
    plans = plan_linears(model.config)
    plans["mlp.down_proj"] = replace(plans["mlp.down_proj"], quantized=False)
    with pytest.raises(ContractViolation, match=r"mlp\.down_proj\.weight is BF16 in the trainer and FP8 in the roll"):
        sync(worker, stream(model, plans=plans))


def test_a_tensor_without_sums_is_named(engine):
    _, worker = engine
    name = SUM_PREFIX + "model.norm.weight"
    with pytest.raises(ContractViolation, match=r"sums of model\.norm\.weight did not arrive"):
        sync(worker, stream(build_trainer(4), edit=lambda items: [item for item in items if item[0] != name]))


def test_a_changed_byte_in_a_live_weight_is_detected(engine):
    _, worker = engine
    model = build_trainer(5)
    sync(worker, stream(model))
    receiver_items = [(n, t) for n, t in stream(model) if n.startswith("jetrl.contract")]

    def verify():
        receiver = ContractReceiver()
        assert receiver.take(receiver_items) == []
        live = live_tensors(worker.model_runner.model)
        return receiver.verify(live, scale_rule=RULE, probe=formats.get("fp8").probe(torch.device("cpu"), RULE))

    counts = verify()
    assert (counts["quantized"], counts["plain"]) == (14, 13)
    assert verify() == counts
    weight = worker.model_runner.model.model.layers[0].mlp.gate_up_proj.weight
    weight.data.view(torch.uint8)[400, 200] ^= 1
    with pytest.raises(ContractViolation, match=r"layers\.0\.mlp\.up_proj\.weight differs"):
        verify()


def test_a_loaders_error_is_raised_and_the_next_sync_works(engine):
    _, worker = engine

    def wrong_shape(items):
        return [(n, t[:128] if n == "model.layers.0.mlp.up_proj.weight" else t) for n, t in items]

    with pytest.raises(RuntimeError, match=r"start \(0\) \+ length \(384\) exceeds dimension size \(128\)"):
        sync(worker, stream(build_trainer(6), edit=wrong_shape))
    sync(worker, stream(build_trainer(6)))


def test_the_trainer_sends_sums_of_every_tensor():
    model = build_trainer(7)
    items = list(stream(model))
    summed = {name.removeprefix(SUM_PREFIX) for name, _ in items if name.startswith(SUM_PREFIX)}
    assert summed == set(model.state_dict())

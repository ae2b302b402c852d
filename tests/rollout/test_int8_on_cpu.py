# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU under ``jetrl_int8``: live qdata after every sync, and the layers' arithmetic."""

from types import SimpleNamespace

import pytest
import torch
import vllm_engine
from streams import receiver_of
from tiny_models import tiny_model
from torch import nn

from jetrl_verl import formats, kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.reference import gemm_int8, quantize_int8
from jetrl_verl.rollout.live import live_tensors
from jetrl_verl.sync.contract import ContractReceiver
from jetrl_verl.sync.quantize import as_tensors, quantize_stream
from jetrl_verl.sync.statement import ContractViolation


def build_trainer(seed: int):  # Qwen2 has biases on q, k and v
    return tiny_model("qwen2", seed, vocab_size=96, hidden_size=256, intermediate_size=384)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, cpu_platform):
    """(vLLM, its model)."""
    folder = tmp_path_factory.mktemp("model")
    build_trainer(0).to(torch.bfloat16).save_pretrained(folder)
    options = JetConfig("int8_rollout", train="bf16", rollout="int8")
    with vllm_engine.cpu_settings():
        llm, worker = vllm_engine.start(folder, options, load_format="dummy")
        yield llm, worker.model_runner.model


def stream(model):
    return quantize_stream(model.state_dict().items(), plan_linears(model.config, format_name="int8"), "fp32")


def sync(model, trainer) -> None:
    """Load as verl's worker does, and process as verl does after it."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model.load_weights(as_tensors(stream(trainer)))
    process_weights_after_loading(
        model,
        SimpleNamespace(quantization="jetrl_int8", dtype=torch.bfloat16, word_embeddings_untied_by_checkpoint=False),
        torch.device("cpu"),
    )


def test_every_sync_writes_the_trainers_qdata_into_the_live_parameters(engine):
    _, model = engine
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for seed in (1, 2):
        trainer = build_trainer(seed).to(torch.bfloat16)
        sync(model, trainer)
        live, trained = model.model.layers[1], trainer.model.layers[1]
        pieces = {
            live.self_attn.qkv_proj: [getattr(trained.self_attn, f"{n}_proj") for n in "qkv"],
            live.self_attn.o_proj: [trained.self_attn.o_proj],
            live.mlp.gate_up_proj: [trained.mlp.gate_proj, trained.mlp.up_proj],
            live.mlp.down_proj: [trained.mlp.down_proj],
        }
        for layer, linears in pieces.items():
            expected = quantize_int8(torch.cat([linear.weight.detach() for linear in linears]))
            assert torch.equal(layer.weight, expected.qdata)
            assert torch.equal(layer.weight_scale_inv, expected.scales)
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_the_merged_layer_equals_gemm_int8_in_every_bit(engine):
    _, model = engine
    trainer = build_trainer(3).to(torch.bfloat16)
    sync(model, trainer)
    x = torch.randn(5, 256).bfloat16()
    attention = trainer.model.layers[0].self_attn
    linears = [getattr(attention, f"{n}_proj") for n in "qkv"]
    with torch.no_grad():
        output, _ = model.model.layers[0].self_attn.qkv_proj(x)
        expected = [gemm_int8(quantize_int8(x), quantize_int8(p.weight), bias=p.bias) for p in linears]
    assert torch.equal(output, torch.cat(expected, dim=-1))


class Int8Linear(nn.Linear):
    """The trainer's linear with the rollout's arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = quantize_int8(self.weight)
        return kernels.fprop_int8(x, q.qdata, q.scales, self.bias)


def build_policy(seed: int):
    """One input feature has weights 30 times as large: INT8's step grows with it, BF16's does not. Otherwise INT8's
    error is no larger than the difference between BF16 implementations."""
    model = build_trainer(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter[:, 0] *= 30
    return model


def test_the_rollout_is_closer_to_the_int8_policy_than_to_the_bf16_one(engine):
    llm, model = engine
    sync(model, build_policy(4))
    prompt = torch.randint(0, 96, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    rollout = vllm_engine.prompt_log_probs(llm, prompt)

    def trainer(candidate) -> torch.Tensor:
        with torch.no_grad():
            logits = candidate(torch.tensor([prompt])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    bf16, int8 = build_policy(4).to(torch.bfloat16), build_policy(4).to(torch.bfloat16)
    for name, module in int8.named_modules():
        if name.endswith("_proj"):
            module.__class__ = Int8Linear
    assert (rollout - trainer(int8)).square().mean() < (rollout - trainer(bf16)).square().mean() / 2


def statement(trainer) -> ContractReceiver:
    """The contract check's receiver after a sync of ``trainer``."""
    probe = formats.get("int8").probe(torch.device("cpu"), "fp32")
    return receiver_of(stream(trainer), scale_rule="fp32", probe=probe)


def test_the_contract_holds_and_detects_each_kind_of_difference(engine):
    _, model = engine
    trainer = build_trainer(5)
    sync(model, trainer)
    arguments = dict(scale_rule="fp32", probe=formats.get("int8").probe(torch.device("cpu"), "fp32"))

    def verify() -> dict:
        return statement(trainer).verify(live_tensors(model), **arguments)

    counts = verify()
    assert (counts["quantized"], counts["plain"]) == (14, 13)
    layer = model.model.layers[0].mlp.gate_up_proj
    for parameter, place, piece in (("weight", (400, 200), "up_proj"), ("weight_scale_inv", (3, 0), "gate_proj")):
        live = getattr(layer, parameter).data
        stock = live[place].clone()
        live[place] = stock + 1
        with pytest.raises(ContractViolation, match=rf"layers\.0\.mlp\.{piece}\.weight differs"):
            verify()
        live[place] = stock
    assert verify() == counts
    with pytest.raises(ContractViolation, match="probe GEMM"):
        statement(trainer).verify(
            live_tensors(model), scale_rule="fp32", probe=formats.get("fp8").probe(torch.device("cpu"), "fp32")
        )

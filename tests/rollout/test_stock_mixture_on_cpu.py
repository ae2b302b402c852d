# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts under ``fp8_rollout``: vLLM's own layers up to the router's logits, our products after them."""

import pytest
import torch
import vllm_engine
from streams import parts_of_model
from tiny_models import tiny_model, with_preferences
from vllm_engine import model_log_probs, prompt_log_probs, sync

from jetrl_verl import kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.sync.statement import ContractViolation

RULE, PROMPT = "fp32", list(range(3, 47))


def policy(seed: int):
    return with_preferences(tiny_model("qwen3_moe", seed)).bfloat16()


@pytest.fixture(scope="module")
def engine(tmp_path_factory, cpu_platform):
    folder = tmp_path_factory.mktemp("mixture")
    policy(0).save_pretrained(folder)
    options = JetConfig("fp8_rollout", train="bf16", rollout="fp8", scale_rule=RULE)
    with vllm_engine.cpu_settings():
        yield vllm_engine.start(folder, options, load_format="dummy")


def trainer_log_probs(model) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model_log_probs(model, PROMPT)


def test_the_rollout_samples_from_the_fp8_policy(engine):
    llm, worker = engine
    model = policy(5)
    sync(worker, parts_of_model(model))
    rollout = prompt_log_probs(llm, PROMPT)
    in_bf16 = trainer_log_probs(model)
    replace_linears(model, plan_linears(model.config), scale_rule=RULE)
    in_fp8 = trainer_log_probs(model)
    uniform = torch.full_like(rollout, -torch.tensor(64.0).log())
    distances = [(rollout - other).abs().mean() for other in (in_fp8, in_bf16, uniform)]
    # The trainers' expert weights are rounded to BF16, the rollout's are not.
    assert max(distances[:2]) < 0.25 * distances[2]


def test_only_the_experts_products_are_not_vllms(engine):
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    from jetrl_verl.rollout.experts import JetExpertsMethod

    llm, worker = engine
    model = policy(5)
    sync(worker, parts_of_model(model))
    block = worker.model_runner.model.model.layers[0].mlp
    assert type(block) is Qwen3MoeSparseMoeBlock
    assert isinstance(block.experts.routed_experts.quant_method, JetExpertsMethod)
    assert type(block.gate.quant_method).__name__ == "UnquantizedLinearMethod"

    replace_linears(model, plan_linears(model.config), scale_rule=RULE)
    x, logits = torch.randn(9, 256).bfloat16(), torch.randn(9, 8).bfloat16()
    routed = block.experts.routed_experts
    experts, shares = kernels.route(logits.float(), 2, True)
    with torch.no_grad():
        expected = model.model.layers[0].mlp.experts(x, experts, shares)
        assert torch.equal(routed.quant_method.apply_monolithic(routed, x, logits), expected)


def test_another_routing_is_refused_at_the_sync(engine):
    _, worker = engine
    for layer in (model := policy(5)).model.layers:
        layer.mlp.gate.norm_topk_prob = False
    with pytest.raises(ContractViolation, match="2 of 8 experts a token by softmax, weights not renorm"):
        sync(worker, parts_of_model(model))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over two, four and eight ranks, and mixtures over two: log-probabilities equal the trainer's in all
bits, with prefix caching, chunked prefill and preemption as in test_exact_rollout_on_cpu.py."""

from importlib.util import find_spec

import pytest
import test_exact_rollout_on_cpu as checks
import torch
import vllm_engine
from streams import receiver_of
from tiny_models import save_processor

from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.quantize import as_tensors, quantize_stream
from jetrl_verl.tools.demo.policy import build_tokenizer

SEED = 11
SHAPES = {
    "llama": dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=1024),
    "qwen3": dict(num_attention_heads=8, num_key_value_heads=4, head_dim=128, intermediate_size=1024),
    "qwen3_5": dict(linear_num_key_heads=2, intermediate_size=1024),
    "qwen3_5_moe": dict(linear_num_key_heads=2, num_experts_per_tok=3, moe_intermediate_size=256),
    "qwen3_vl": dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024, vocab_size=128),
    "qwen2_5_vl": dict(num_key_value_heads=2, intermediate_size=1024, vocab_size=128),
    "qwen3_moe": dict(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=3, moe_intermediate_size=512),
}
"""Inputs of o and down divide into eight parts of whole blocks, a mixture's into two."""
ORDERED = dict.fromkeys(SHAPES, 2) | dict.fromkeys(("qwen3_5_moe", "qwen3_moe"), 1)
"""Row-parallel linears of a layer; a mixture sums over ranks itself."""
IMAGES = ("qwen3_vl", "qwen2_5_vl") if find_spec("torchvision") else ()
"""Families whose engine accepts images, so that each rank has its share of the tower."""


def policy(family: str):
    from tiny_models import tiny_model, with_preferences

    return with_preferences(tiny_model(family, SEED, **checks.SHAPE | SHAPES[family]))


def load(worker, family: str) -> int:
    """Load a rank's share of the policy, where the map of live places has to find it; returns the number of layers that
    add in the trainer's order."""
    from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits

    from jetrl_verl.rollout.experts import is_of_experts, load_experts
    from jetrl_verl.rollout.live import live_tensors
    from jetrl_verl.rollout.row_parallel import OrderedRowParallelLinear

    source, model = policy(family), worker.model_runner.model
    weights = {
        name: weight.to(torch.bfloat16)
        for name, weight in source.state_dict().items()
        if ".visual." not in name or family in IMAGES
    }
    quantized, others = list(quantize_stream(weights.items(), plan_linears(source.config), checks.RULE)), []
    for name, tensor in as_tensors(quantized):
        if is_of_experts(name, source.config):
            load_experts(model, name, tensor, worker.rank)
        else:
            others.append((name, tensor))
    model.load_weights(others)
    receiver = receiver_of(
        quantized, scale_rule=checks.RULE, probe=1, ranks=worker.vllm_config.parallel_config.tensor_parallel_size
    )
    receiver.verify(live_tensors(model), scale_rule=checks.RULE, probe=1)
    monkey_patch_compute_logits(model, checks.TOKENS, checks.BANNED)
    return sum(isinstance(module, OrderedRowParallelLinear) for module in model.modules())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "ranks"), [*(("qwen3", ranks) for ranks in (4, 8)), *((family, 2) for family in SHAPES)]
)
def test_equal_in_every_bit_with_chunks_prefixes_and_preemption(family, ranks, tmp_path, cpu_platform):
    with vllm_engine.cpu_settings():
        policy(family).to(torch.bfloat16).save_pretrained(tmp_path)
        options = JetConfig("jet_fp8_exact", train="fp8", rollout="fp8", scale_rule=checks.RULE, operations="shared")
        settings = dict(load_format="dummy", tensor_parallel_size=ranks) | checks.crowded(family)
        if family in IMAGES:
            tokenizer = build_tokenizer()
            save_processor(tmp_path, family, tokenizer)
            tokenizer.save_pretrained(tmp_path)
            limits = {"image": 1, "video": 0}
            settings |= dict(images=True, skip_tokenizer_init=False, limit_mm_per_prompt=limits)
        llm, _ = vllm_engine.start(tmp_path, options, **settings)
        try:
            layers = policy(family).config.get_text_config().num_hidden_layers
            assert llm.collective_rpc(load, args=(family,)) == [ORDERED[family] * layers] * ranks
            rollout = checks.Rollout(family, llm, None)
            rollout.watch()
            prompts = checks.prompts_with_shared_prefixes(SEED)
            temperatures = [checks.TEMPERATURES[i % 3] for i in range(len(prompts))]
            outputs, again = (rollout.generate(prompts, temperatures) for _ in range(2))
        finally:
            llm.llm_engine.engine_core.shutdown()
    rollout.check_crowded(outputs + again)

    with torch.no_grad():
        model = checks.as_trainer(policy(family), tp=ranks)
        assert checks.differences(model, prompts, temperatures, outputs, packed=False, micro_batch=5) == 0
        assert checks.differences(model, prompts, temperatures, again, packed=True, micro_batch=12) == 0
        of_fewer = checks.as_trainer(policy(family), tp=ranks // 2)
        assert checks.differences(of_fewer, prompts, temperatures, outputs, packed=True, micro_batch=12) > 0
    assert checks.differences(model, prompts, temperatures, again, packed=True, micro_batch=1) == 0

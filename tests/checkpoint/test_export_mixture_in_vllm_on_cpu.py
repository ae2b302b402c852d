# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An exported mixture in vLLM: stock vLLM serves the BF16 folder; vLLM's expert loader gives our method's layers the
bytes of a weight sync. Stock block-FP8 kernels need a GPU or AMX (test_export_on_gpu.py).
"""

import json

import pytest
import torch
import vllm_engine
from served_mixture import PROMPT, RULE, check_served, policy
from streams import receiver_of
from transformers import AutoConfig

from jetrl_verl import formats
from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.config.options import JetConfig
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.train.weight_stream import stated_constants


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    policy().save_pretrained(root / "policy")
    for name in ("bf16", "fp8"):
        export(root / "policy", root / name, ExportOptions(name))
    return root


@pytest.fixture
def start(cpu_platform):
    """Callable ``(folder, options) -> (llm, worker)``; the engine is gone afterwards."""
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        yield vllm_engine.start
        cleanup_dist_env_and_memory()


def test_stock_vllm_serves_the_bf16_folder(folders, start):
    llm, _ = start(folders / "bf16", None)
    served = vllm_engine.prompt_log_probs(llm, PROMPT)
    model = policy().bfloat16()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    # BF16 on both sides; the bound is 5% of the distance to a uniform policy.
    assert (served - expected).abs().mean() < 0.05 * (expected + torch.tensor(64.0).log()).abs().mean()


def test_loaded_experts_equal_those_of_a_weight_sync(folders, start):
    from jetrl_verl.rollout.live import live_constants, live_tensors

    llm, worker = start(folders / "fp8", JetConfig("fp8_rollout", train="bf16", rollout="fp8", scale_rule=RULE))
    model, trained = worker.model_runner.model, policy()
    probe = formats.get("fp8").probe(torch.device("cpu"), RULE)
    weights = quantize_stream(trained.state_dict().items(), plan_linears(trained.config), RULE)
    receiver = receiver_of(weights, scale_rule=RULE, probe=probe, constants=stated_constants(trained))
    constants = live_constants(model, shared=False)
    counts = receiver.verify(live_tensors(model), scale_rule=RULE, probe=probe, constants=constants)
    assert counts["quantized"] == 2 * (4 + 2)
    check_served(trained, vllm_engine.prompt_log_probs(llm, PROMPT))


def test_vllm_and_transformers_4_read_the_configuration(folders):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    written = json.loads((folders / "fp8" / "config.json").read_text())
    assert written["num_experts"] == AutoConfig.from_pretrained(folders / "fp8").num_experts == 8
    config = Fp8Config.from_config(written["quantization_config"])
    assert config.is_checkpoint_fp8_serialized and config.weight_block_size == [128, 128]
    merged = Qwen3MoeForCausalLM.packed_modules_mapping
    skipped = {
        suffix: is_layer_skipped(f"model.layers.1.{suffix}", config.ignored_layers, merged)
        for suffix in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts")
    }
    assert skipped == {
        "self_attn.qkv_proj": False,
        "self_attn.o_proj": False,
        "mlp.gate": True,
        "mlp.experts": False,
    }

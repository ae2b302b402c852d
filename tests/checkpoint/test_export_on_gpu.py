# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM serves the exported block-FP8 folder with the rollout's own log-probabilities.

``VLLM_USE_DEEP_GEMM=0``, as the command advises: DeepGEMM would round scales to powers of two. vLLM's activation
quantizer follows the contract; a bias would be added elsewhere, so the model has none. Its experts sum in another order
and its router rounds to BF16, so a mixture's parameters are equal in every byte and its log-probabilities close.
"""

import gc

import pytest
import served_mixture
import torch
import vllm_engine
from tiny_models import tiny_model

from jetrl_verl.checkpoint.export import ExportOptions, export
from jetrl_verl.config.options import JetConfig

PROMPT = torch.randint(0, 96, (61,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    model = tiny_model("qwen3", 1, vocab_size=96, hidden_size=512, intermediate_size=1024, num_attention_heads=4)
    model.save_pretrained(root / "policy")
    export(root / "policy", root / "out", ExportOptions())
    return root / "out"


def score(
    folder, monkeypatch, options: JetConfig | None = None, prompt: list[int] = PROMPT
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities [len(prompt) - 1] of the prompt in a vLLM engine, and the engine's live parameters."""
    for name, value in {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    from vllm.distributed import cleanup_dist_env_and_memory

    # Given, not measured: other jobs may use the GPU.
    memory = dict(gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28)
    llm, worker = vllm_engine.start(folder, options, **memory)
    scored = vllm_engine.prompt_log_probs(llm, prompt)
    live = {name: parameter.detach().cpu() for name, parameter in worker.model_runner.model.named_parameters()}
    del llm, worker
    gc.collect()
    cleanup_dist_env_and_memory()
    return scored, live


def test_stock_vllm_gives_the_rollouts_log_probabilities(folders, monkeypatch):
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8")
    shared, weights = score(folders / "fp8", monkeypatch, options)
    stock, stock_weights = score(folders / "fp8", monkeypatch)
    bf16, _ = score(folders / "bf16", monkeypatch)

    for name, weight in weights.items():
        assert torch.equal(weight.view(torch.uint8), stock_weights[name].view(torch.uint8)), name
    assert not torch.equal(bf16, shared), "quantization shows"
    assert torch.equal(stock, shared)


def test_stock_vllm_serves_a_mixture(tmp_path, monkeypatch):
    """Experts' qdata and scales in vLLM's parameters equal the policy's in every byte."""
    policy = served_mixture.policy()
    policy.save_pretrained(tmp_path / "policy")
    export(tmp_path / "policy", tmp_path / "fp8", ExportOptions("fp8"))
    scored, live = score(tmp_path / "fp8", monkeypatch, prompt=served_mixture.PROMPT)
    weights = served_mixture.quantized(policy)
    for layer in range(2):
        for trainers, vllms in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
            weight = weights[f"model.layers.{layer}.mlp.experts.{trainers}"]
            name = f"model.layers.{layer}.mlp.experts.routed_experts.{vllms}"
            assert torch.equal(live[name].view(torch.uint8), weight.qdata.view(torch.uint8)), name
            assert torch.equal(live[f"{name}_scale_inv"], weight.scales), name
    served_mixture.check_served(policy, scored)

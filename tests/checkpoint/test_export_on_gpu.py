# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM serves the exported block-FP8 folder with the rollout's own log-probabilities.

``VLLM_USE_DEEP_GEMM=0``, as the command advises: DeepGEMM would round scales to powers of two. What then differs from
our method is vLLM's activation quantizer and where a bias is added; a model without biases leaves the quantizer, whose
scale ``amax / 448`` and division are the contract's.
"""

import gc

import pytest
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


def score(folder, monkeypatch, options: JetConfig | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities [len(PROMPT) - 1] of the prompt in one vLLM engine, and the engine's live parameters."""
    for name, value in {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    from vllm.distributed import cleanup_dist_env_and_memory

    # Given, not measured: other jobs may use the GPU.
    memory = dict(gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28)
    llm, worker = vllm_engine.start(folder, options, **memory)
    scored = vllm_engine.prompt_log_probs(llm, PROMPT)
    live = {name: parameter.detach().cpu() for name, parameter in worker.model_runner.model.named_parameters()}
    del llm, worker
    gc.collect()
    cleanup_dist_env_and_memory()
    return scored, live


def test_stock_vllm_gives_the_rollouts_log_probabilities(folders, monkeypatch):
    options = JetConfig("jet_fp8", train="fp8", rollout="fp8")
    ours, our_weights = score(folders / "fp8", monkeypatch, options)
    stock, stock_weights = score(folders / "fp8", monkeypatch)
    bf16, _ = score(folders / "bf16", monkeypatch)

    for name, weight in our_weights.items():
        assert torch.equal(weight.view(torch.uint8), stock_weights[name].view(torch.uint8)), name
    quantization, difference = (bf16 - ours).abs(), (stock - ours).abs()
    print(f"|stock - ours| max {difference.max():.2e}, |bf16 - ours| max {quantization.max():.2e}")
    assert quantization.max() > 0
    assert torch.equal(stock, ours)

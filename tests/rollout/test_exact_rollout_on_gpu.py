# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Zero mismatch on a GPU by model family, with torch.compile, CUDA graphs and FlashAttention 3, also next to images.
The checks are those of test_exact_rollout_on_cpu.py and test_images_on_cpu.py; each has its own process, since an
engine leaves memory and graphs."""

import multiprocessing
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FAMILIES = ("llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_vl")
SEEDS = (11, 12, 13)
MEMORY = dict(gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28)
"""Fixed: other jobs may use the GPU."""


def check_family(family: str, folder: str, kv_cache: str) -> None:
    """In a process of its own: three weight updates, each with two generations and several micro-batch splits."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VERL_RAY_JOB_ID"] = f"test-{os.getpid()}"
    import test_exact_rollout_on_cpu as checks
    import vllm_engine

    from jetrl_verl.config.options import JetConfig

    checks.save_untrained(family, Path(folder))
    flow = dict(train="fp8", rollout="fp8", scale_rule=checks.RULE, operations="shared")
    options = JetConfig("jet_fp8_exact", **flow, kv_cache=kv_cache)
    llm, worker = vllm_engine.start(
        folder,
        options,
        load_format="dummy",
        enforce_eager=False,
        **MEMORY,
        **checks.crowded(family),
    )
    worker.monkey_patch_model(checks.TOKENS, checks.BANNED)
    rollout = checks.Rollout(family, llm, worker, kv_cache)
    rollout.watch()
    torch.set_default_device("cuda")
    for seed in SEEDS:
        checks.test_equal_in_every_bit_after_each_weight_update(rollout, seed)
        print(f"{family}, weights {seed}: equal; {rollout.chunks} chunks, {rollout.preemptions} preemptions")
    runners = [kind.__module__ for kind in type(worker.model_runner).__mro__]
    if "vllm.v1.worker.gpu_model_runner" in runners:  # vLLM's second model runner computes these itself
        checks.test_prompt_log_probabilities_are_equal_too(rollout)


def check_images(family: str, folder: str) -> None:
    """In a process of its own."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import test_images_on_cpu as checks

    checks.check(family, Path(folder), "cuda", enforce_eager=False, **MEMORY)


def run(function: Callable[..., None], *arguments: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("family", "kv_cache"), [*((family, "bf16") for family in FAMILIES), ("qwen3", "fp8")])
def test_log_probabilities_are_equal_in_every_bit(family, kv_cache, tmp_path):
    run(check_family, family, str(tmp_path), kv_cache)


@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("torchvision") is None, reason="transformers' processors of images and videos need it")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"])
def test_text_is_exact_next_to_images_which_are_close(family, tmp_path):
    run(check_images, family, str(tmp_path))

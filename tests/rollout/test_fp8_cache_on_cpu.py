# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An FP8 KV cache in a real vLLM on the CPU holds twice the tokens, and log-probabilities equal the trainer's in all 32
bits. Engine and checks are those of test_exact_rollout_on_cpu.py."""

import pytest
import torch
import vllm_engine
from test_exact_rollout_on_cpu import (
    BANNED,
    TEMPERATURES,
    TOKENS,
    Rollout,
    build_policy,
    build_trainer,
    differences,
    prompts_with_shared_prefixes,
    stream,
    trainer_log_probs,
)
from vllm_engine import sync

from jetrl_verl import kernels
from jetrl_verl.config.options import JetConfig
from jetrl_verl.reference import cache_shape
from jetrl_verl.reference.kv_cache import cache_units
from jetrl_verl.rollout import cpu_attention
from jetrl_verl.sync.statement import ContractViolation

FAMILY = "qwen3"
BLOCK_SIZE, PAGES = (vllm_engine.CROWDED[name] for name in ("block_size", "num_gpu_blocks_override"))
SHARED = JetConfig("jet_fp8_exact", train="fp8", rollout="fp8", operations="shared", kv_cache="fp8")
BASELINE = JetConfig("fp8_rollout", train="bf16", rollout="fp8", kv_cache="fp8")


def start(folder, options: JetConfig, **changes):
    build_policy(FAMILY, 0).to(torch.bfloat16).save_pretrained(folder)
    return vllm_engine.start(folder, options, **({"load_format": "dummy"} | vllm_engine.CROWDED | changes))


@pytest.fixture(scope="module", params=[SHARED], ids=["shared"])
def rollout(request, tmp_path_factory, cpu_platform):
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        llm, worker = start(tmp_path_factory.mktemp("fp8_cache"), request.param)
        worker.monkey_patch_model(TOKENS, BANNED)
        engine = Rollout(FAMILY, llm, worker)
        engine.watch()
        yield engine
        del llm, worker
        engine.llm = engine.worker = None
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("seed", [21, 22])
def test_equal_in_every_bit_after_each_weight_update(rollout, seed):
    sync(rollout.worker, stream(FAMILY, seed, kv_cache="fp8"))
    rollout.llm.reset_prefix_cache()
    rollout.chunks = rollout.preemptions = 0
    prompts = prompts_with_shared_prefixes(seed)
    temperatures = [TEMPERATURES[i % 3] for i in range(len(prompts))]
    outputs = rollout.generate(prompts, temperatures)
    again = rollout.generate(prompts, temperatures)
    rollout.check_crowded(outputs + again)

    model = build_trainer(FAMILY, seed, "fp8")
    with torch.no_grad():
        assert differences(model, prompts, temperatures, outputs, packed=False, micro_batch=5) == 0
        assert differences(model, prompts, temperatures, again, packed=True, micro_batch=12) == 0
        # A BF16 cache gives other log-probabilities.
        other = build_trainer(FAMILY, seed)
        assert differences(other, prompts, temperatures, outputs, packed=True, micro_batch=12) > 0
    # In the forward that carries the gradient.
    assert differences(model, prompts, temperatures, outputs, packed=True, micro_batch=4) == 0


def test_cache_pages_are_bytes_of_half_the_bf16_size(rollout):
    runner = rollout.worker.model_runner
    kv_heads = runner.model_config.get_num_kv_heads(runner.parallel_config)
    for cache in runner.kv_caches:
        assert cache.dtype == torch.uint8 and cache_units(cache).shape == cache_shape(PAGES, BLOCK_SIZE, kv_heads)
    spec = next(iter(runner.get_kv_cache_spec().values()))
    assert spec.page_size_bytes == 2 * BLOCK_SIZE * kv_heads * 129
    of_bf16 = 2 * BLOCK_SIZE * kv_heads * 128 * 2
    assert of_bf16 / spec.page_size_bytes == 256 / 129
    impl = runner.model.model.layers[0].self_attn.attn.impl
    assert type(impl) is cpu_attention.FP8CPUAttention and impl.kv_cache_dtype == "auto"


def test_stale_bytes_in_the_cache_after_a_sleep_change_nothing(rollout):
    """Pages are not initialized after waking up; here they are NaN as data and huge as scales."""
    sync(rollout.worker, stream(FAMILY, 23, kv_cache="fp8"))
    prompts = prompts_with_shared_prefixes(23)
    for cache in rollout.worker.model_runner.kv_caches:
        cache.fill_(255)
    rollout.llm.reset_prefix_cache()
    after = rollout.generate(prompts, [1.0] * len(prompts))
    model = build_trainer(FAMILY, 23, "fp8")
    with torch.no_grad():
        assert differences(model, prompts, [1.0] * len(prompts), after, packed=True, micro_batch=12) == 0


def test_a_trainer_with_another_cache_is_refused_at_the_sync(rollout):
    names = "attention over a BF16 KV cache, attention over an FP8 KV cache, norm_rotary"
    with pytest.raises(ContractViolation, match=f"contract check: {names} of the shared operations differ"):
        sync(rollout.worker, stream(FAMILY, 24))


@pytest.mark.parametrize("broken", ["norm_rotary_write_fp8", "write_kv", "decode_attention"])
def test_a_fault_in_cache_writes_or_decode_is_named_at_the_sync(rollout, monkeypatch, broken):
    """A wrong scale of a key, or scaled queries: no weight shows it."""
    stock = getattr(kernels, broken)

    def write(*call):
        output, (cache, slots) = stock(*call), call[-2:]
        cache[slots[0] // 16, 0, 0, 16 * 128 + slots[0] % 16] += 1  # the scale of a key
        return output

    def decode(q, *call):
        return stock(q * 1.0078125, *call)

    monkeypatch.setattr(kernels, broken, decode if broken == "decode_attention" else write)
    name = "norm_rotary" if broken.startswith("norm") else "attention over an FP8 KV cache"
    with pytest.raises(ContractViolation, match=f"contract check: {name} of the shared"):
        sync(rollout.worker, stream(FAMILY, 25, kv_cache="fp8"))


@pytest.mark.parametrize("rollout", [BASELINE], ids=["baseline"], indirect=True)
def test_a_baseline_has_the_fp8_cache_and_stock_operations(rollout):
    sync(rollout.worker, stream(FAMILY, 26, operations="stock"))
    model = rollout.worker.model_runner.model
    assert type(model.model.norm).__module__.startswith("vllm.")
    assert type(model.model.layers[0].self_attn.attn.impl) is cpu_attention.FP8CPUAttention
    prompt = prompts_with_shared_prefixes(26)[4]
    sampled = vllm_engine.prompt_log_probs(rollout.llm, prompt)
    for layer in model.model.layers:
        assert layer.self_attn.attn.get_kv_cache_spec(rollout.worker.vllm_config).dtype == torch.uint8
    with torch.no_grad():
        (trained,) = trainer_log_probs(build_trainer(FAMILY, 26), [prompt], [1.0], packed=True)
    # Each side has its own BF16 operations, and the rollout alone has FP8 keys and values.
    assert 0 < (sampled - trained).abs().max() < 0.3

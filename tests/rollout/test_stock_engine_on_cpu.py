# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An engine without one of our formats is stock vLLM, before and after one of ours in the same process: engines of
``bf16``, ``jet_fp8`` with shared operations and ``bf16`` again, with the plugin loaded by its entry point."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_inventory import PACKAGE
from tiny_models import tiny_model

ROLLOUT = f"{PACKAGE}.rollout"


def run_engines(folder: str, out: str) -> None:
    """In a process of its own: write each engine's inventory and its log-probabilities of a prompt."""
    import vllm_engine
    from engine_inventory import inventory, registries
    from patch_home import current

    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.patches.generation import OUTPUTS

    shared = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule="fp32", operations="shared")
    engines = []
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        for options in (None, shared, None):
            changes = {"load_format": "dummy"} if options else {}
            llm, worker = vllm_engine.start(folder, options, **changes)
            engines.append(
                {
                    "engine": inventory(worker),
                    "process": registries(),
                    "imported": sorted(name for name in sys.modules if name.partition(".")[0] == PACKAGE),
                    "operators": [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("jetrl")],
                    "log_probs": vllm_engine.prompt_log_probs(llm, list(range(1, 40))).tolist(),
                    "outputs are vLLM's": not hasattr(current(OUTPUTS), "_jetrl_stock"),
                    "rotary": worker.get_model().model.layers[0].self_attn.rotary_emb.cos_sin_cache.tolist(),
                }
            )
            del llm, worker
            cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(engines))


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    tiny_model("qwen3", 5).to(torch.bfloat16).save_pretrained(folder)
    program = f"import test_stock_engine_on_cpu as t; t.run_engines({str(folder)!r}, {str(folder / 'engines.json')!r})"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "engines.json").read_text())


@pytest.fixture(params=[0, 2], ids=["first", "after jet_fp8"])
def stock(request, engines):
    return engines[request.param]


def test_a_bf16_engine_has_no_part_of_this_package(stock):
    assert PACKAGE not in json.dumps(stock["engine"])
    assert stock["engine"]["quantization"] == "builtins.NoneType"
    # The inventory is not empty.
    modules = stock["engine"]["modules"]
    assert modules["vllm.model_executor.layers.layernorm.RMSNorm"] == 2 * 4 + 1
    assert modules["vllm.model_executor.layers.activation.SiluAndMul"] == 2
    assert modules["vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding"] == 1
    assert modules["vllm.model_executor.layers.logits_processor.LogitsProcessor"] == 1
    assert stock["engine"]["attention"] == {"vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": 2}
    assert stock["engine"]["sampler"] == "vllm.v1.sample.sampler.Sampler"


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first", "jet_fp8", "after jet_fp8"])
def test_only_three_quantization_methods_are_registered_in_the_process(engines, number):
    assert engines[number]["process"] == {
        "global hooks of torch": [],
        "layers": [],
        "attention backends": [],
        "quantization methods": [f"jetrl_{name}: {ROLLOUT}.register" for name in ("bf16", "fp8", "int8")],
        "names in vLLM from this package": [],
    }


def test_kernels_are_imported_by_an_engine_of_this_package_alone(engines):
    first, shared, _ = engines
    heavy = {f"{PACKAGE}.{package}" for package in ("kernels", "nn", "sync", "train", "rollout.method")}
    assert f"{ROLLOUT}.register" in first["imported"]
    assert not heavy & set(first["imported"]) and not first["operators"]
    assert f"{PACKAGE}.kernels" in shared["imported"] and shared["operators"]


def test_outputs_are_vllms_until_verl_is_imported(engines):
    """Our worker imports verl; outputs then differ for requests of verl's server alone."""
    assert [engine["outputs are vLLM's"] for engine in engines] == [True, False, False]


def test_the_jet_fp8_engine_runs_shared_operations(engines):
    engine = engines[1]["engine"]
    modules = engine["modules"]
    shared = {name.removeprefix(f"{ROLLOUT}.") for name in modules if name.startswith(PACKAGE)}
    stock = {"RMSNorm", "SiluAndMul", "RotaryEmbedding", "LogitsProcessor", "Qwen3Attention"}
    module_of = {"Qwen3Attention": "qk_norm"}
    assert shared == {f"{module_of.get(name, 'shared_operations')}.Shared{name}" for name in stock}
    assert not stock & {name.rpartition(".")[2] for name in modules}
    assert engine["attention"] == {f"{ROLLOUT}.cpu_attention.SharedCPUAttention": 2}
    assert engine["attention backend"] == [f"{ROLLOUT}.cpu_attention.SharedCPUAttentionBackend"]
    assert engine["sampler"] == f"{ROLLOUT}.sampler.SharedSampler"
    assert engine["linear methods"][f"{ROLLOUT}.method.JetLinearMethod"] == 2 * 4
    assert engine["worker"][0] == f"{ROLLOUT}.worker.JetWorker"


def test_a_stock_engine_after_jet_fp8_equals_the_one_before(engines):
    first, shared, after = engines
    assert after["engine"] == first["engine"]
    assert after["log_probs"] == first["log_probs"]
    # vLLM caches the rotary module for all three; the shared one has its own table.
    assert after["rotary"] == first["rotary"] != shared["rotary"]

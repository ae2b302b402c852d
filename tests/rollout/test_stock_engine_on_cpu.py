# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An engine that does not ask for one of our formats is vLLM's alone, with the plugin installed and beside ours.

Three engines in one fresh process: of ``precision=bf16``, of ``jet_fp8`` with shared operations, and again of bf16.
vLLM loads the plugin by its entry point, as it does in every process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_inventory import OURS
from tiny_models import tiny_model

ROLLOUT = f"{OURS}.rollout"


def run_engines(folder: str, out: str) -> None:
    """In a process of its own: write what each engine is made of and what it says about a prompt."""
    import vllm_engine
    from engine_inventory import inventory, registries
    from patch_home import current

    from jetrl_verl.config.options import JetConfig
    from jetrl_verl.patches.generation import OUTPUTS

    shared = JetConfig("jet_fp8", train="fp8", rollout="fp8", scale_rule="fp32", operations="shared")
    found = []
    with vllm_engine.cpu_settings():
        from vllm.distributed import cleanup_dist_env_and_memory

        for options in (None, shared, None):
            changes = {"load_format": "dummy"} if options else {}
            llm, worker = vllm_engine.start(folder, options, **changes)
            found.append(
                {
                    "engine": inventory(worker),
                    "process": registries(),
                    "imported": sorted(name for name in sys.modules if name.partition(".")[0] == OURS),
                    "operators": [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("jetrl")],
                    "log_probs": vllm_engine.prompt_log_probs(llm, list(range(1, 40))).tolist(),
                    "outputs are vLLM's": not hasattr(current(OUTPUTS), "_jetrl_stock"),
                    "rotary": worker.get_model().model.layers[0].self_attn.rotary_emb.cos_sin_cache.tolist(),
                }
            )
            del llm, worker
            cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    tiny_model("qwen3", 5).to(torch.bfloat16).save_pretrained(folder)
    program = f"import test_stock_engine_on_cpu as t; t.run_engines({str(folder)!r}, {str(folder / 'found.json')!r})"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(params=[0, 2], ids=["first", "after ours"])
def stock(request, engines):
    return engines[request.param]


def test_a_bf16_engine_has_nothing_of_ours(stock):
    assert OURS not in json.dumps(stock["engine"])
    assert stock["engine"]["quantization"] == "builtins.NoneType"
    # The list is not empty by mistake.
    modules = stock["engine"]["modules"]
    assert modules["vllm.model_executor.layers.layernorm.RMSNorm"] == 2 * 4 + 1
    assert modules["vllm.model_executor.layers.activation.SiluAndMul"] == 2
    assert modules["vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding"] == 1
    assert modules["vllm.model_executor.layers.logits_processor.LogitsProcessor"] == 1
    assert stock["engine"]["attention"] == {"vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": 2}
    assert stock["engine"]["sampler"] == "vllm.v1.sample.sampler.Sampler"


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first", "ours", "after ours"])
def test_the_process_knows_three_names_of_ours_and_no_more(engines, number):
    assert engines[number]["process"] == {
        "global hooks of torch": [],
        "layers": [],
        "attention backends": [],
        "quantization methods": [f"jetrl_{name}: {ROLLOUT}.register" for name in ("bf16", "fp8", "int8")],
        "names in vLLM that are ours": [],
    }


def test_before_an_engine_of_ours_nothing_that_computes_is_imported(engines):
    first, ours, _ = engines
    heavy = {f"{OURS}.{package}" for package in ("kernels", "nn", "sync", "train", "rollout.method")}
    assert f"{ROLLOUT}.register" in first["imported"]
    assert not heavy & set(first["imported"]) and not first["operators"]
    assert f"{OURS}.kernels" in ours["imported"] and ours["operators"]


def test_outputs_are_vllms_in_a_process_that_verl_is_not_imported_in(engines):
    """Where it is, as behind a worker of ours, they differ for requests of verl's server alone."""
    assert [engine["outputs are vLLM's"] for engine in engines] == [True, False, False]


def test_our_engine_beside_it_runs_ours(engines):
    engine = engines[1]["engine"]
    modules = engine["modules"]
    shared = {name.removeprefix(f"{ROLLOUT}.") for name in modules if name.startswith(OURS)}
    stock = {"RMSNorm", "SiluAndMul", "RotaryEmbedding", "LogitsProcessor", "Qwen3Attention"}
    module_of = {"Qwen3Attention": "qk_norm"}
    assert shared == {f"{module_of.get(name, 'shared_operations')}.Shared{name}" for name in stock}
    assert not stock & {name.rpartition(".")[2] for name in modules}
    assert engine["attention"] == {f"{ROLLOUT}.cpu_attention.SharedCPUAttention": 2}
    assert engine["attention backend"] == [f"{ROLLOUT}.cpu_attention.SharedCPUAttentionBackend"]
    assert engine["sampler"] == f"{ROLLOUT}.sampler.SharedSampler"
    assert engine["linear methods"][f"{ROLLOUT}.method.JetLinearMethod"] == 2 * 4
    assert engine["worker"][0] == f"{ROLLOUT}.worker.JetWorker"


def test_ours_leaves_the_stock_engine_behind_it_as_it_was(engines):
    first, ours, after = engines
    assert after["engine"] == first["engine"]
    assert after["log_probs"] == first["log_probs"]
    # vLLM keeps the rotary module of the first for all three; only ours has a table of its own.
    assert after["rotary"] == first["rotary"] != ours["rotary"]

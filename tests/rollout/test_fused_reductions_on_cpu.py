# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's fusion passes leave the sums of a rollout's ranks alone: they are off, and the graph has nothing they
match."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_engine
from tiny_models import tiny_model

from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.scopes import FUSIONS_OF_REDUCTIONS
from jetrl_verl.rollout.arguments import vllm_arguments
from jetrl_verl.sync.statement import ContractViolation

JET = Job(JetConfig("jet_fp8", train="fp8", rollout="fp8", operations="shared"))
UNCHECKED = replace(JET, options=replace(JET.options, contract_check=False))
"""Its sync ends after the worker's own guards."""
BASELINE = Job(JetConfig("fp8_rollout", train="bf16", rollout="fp8", contract_check=False))
OFF = dict.fromkeys(FUSIONS_OF_REDUCTIONS, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    tiny_model("qwen3", **sizes).save_pretrained(path)
    return str(path)


def config_of(folder: str, arguments: dict, ranks: int):
    """vLLM's whole configuration of an engine after its defaults and checks."""
    from vllm.engine.arg_utils import EngineArgs

    with vllm_engine.cpu_settings():
        fixed = dict(skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, tensor_parallel_size=ranks)
        return EngineArgs(model=folder, **fixed, **arguments).create_engine_config()


def test_passes_are_off_where_vllm_would_turn_them_on(folder, monkeypatch):
    """As on a Hopper GPU with FlashInfer, where every level's default for more than one rank is on."""
    from vllm.config import vllm as defaults

    from jetrl_verl.rollout.row_parallel import fused_reductions

    passes = defaults.OPTIMIZATION_LEVEL_02["compilation_config"]["pass_config"]
    assert set(FUSIONS_OF_REDUCTIONS) <= set(passes)
    assert passes["fuse_allreduce_rms"] is defaults.enable_allreduce_rms_fusion
    for name in FUSIONS_OF_REDUCTIONS:
        monkeypatch.setitem(passes, name, True)
    config = config_of(folder, vllm_arguments(JET, None), 2)
    assert {name: getattr(config.compilation_config.pass_config, name) for name in OFF} == OFF
    assert fused_reductions(config) == []

    config.compilation_config.pass_config.enable_sp = True
    assert fused_reductions(config) == ["enable_sp"]
    config.parallel_config.tensor_parallel_size = 1
    assert fused_reductions(config) == []


@pytest.fixture
def receive(folder, monkeypatch, cpu_platform):
    """Syncs weights into a worker over some ranks whose passes are turned on after our arguments; returns syncs."""
    from jetrl_verl.rollout import worker as module

    class Worker(module.JetWorker, module.JetWorkerExtension):
        """The extension mixed in as by vLLM."""

    received = []
    parent = module.vLLMColocateWorkerExtension
    monkeypatch.setattr(parent, "update_weights_from_ipc", lambda self, **options: received.append(self))
    monkeypatch.setattr(module, "live_constants", lambda *of: {})

    def run(job: Job, ranks: int, *passes: str, quantized: bool = True) -> int:
        config = config_of(folder, vllm_arguments(job, None), ranks)
        config.quant_config = config.quant_config if quantized else None
        for name in passes:
            setattr(config.compilation_config.pass_config, name, True)
        worker = object.__new__(Worker)  # without a process group, and below without a model and a sender
        worker.vllm_config = config
        worker.model_runner = SimpleNamespace(vllm_config=config, model=torch.nn.Module())
        worker.update_weights_from_ipc()
        return len(received)

    return run


@pytest.mark.parametrize("name", FUSIONS_OF_REDUCTIONS)
def test_the_worker_refuses_weights_if_a_pass_fuses_sums(receive, name):
    with pytest.raises(ContractViolation) as refused:
        receive(UNCHECKED, 2, name)
    assert str(refused.value) == (
        "contract check: the trainer repeats the sums of the rollout's ranks, but vLLM was started with "
        f"compilation_config.pass_config.{name}=true. Do not override "
        "rollout.engine_kwargs.vllm.compilation_config.pass_config."
    )


def test_the_worker_refuses_weights_under_another_quantization(receive):
    with pytest.raises(ContractViolation, match="vLLM was started with quantization=None. Do not override"):
        receive(UNCHECKED, 1, quantized=False)


@pytest.mark.parametrize(
    ("options", "ranks", "passes"),
    [
        (UNCHECKED, 2, ()),
        (UNCHECKED, 2, ("fuse_act_quant",)),
        (UNCHECKED, 1, FUSIONS_OF_REDUCTIONS),
        (BASELINE, 2, FUSIONS_OF_REDUCTIONS),
    ],
    ids=["no pass", "a pass that leaves sums alone", "one rank", "a trainer that repeats no sum"],
)
def test_the_worker_receives_weights_if_no_sum_is_fused(receive, options, ranks, passes):
    assert receive(options, ranks, *passes) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_the_users_settings_of_other_passes_stay(as_json):
    given = {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_act_quant": True, "enable_sp": False}}
    user = {"compilation_config": json.dumps(given) if as_json else given}
    arguments = vllm_arguments(JET, user)
    expected = {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_act_quant": True, **OFF}}
    assert arguments["compilation_config"] == expected
    assert vllm_arguments(JET, arguments) == arguments
    assert given["pass_config"] == {"fuse_act_quant": True, "enable_sp": False}, "not changed in place"
    # A baseline's trainer repeats no sum.
    assert vllm_arguments(BASELINE, user)["compilation_config"] is user["compilation_config"]
    assert "compilation_config" not in vllm_arguments(BASELINE, None)


def operations_in(function, *inputs) -> set[str]:
    """Names of the functions that the traced ``function`` calls, in one graph."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (graph,) = graphs
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


def test_a_shared_norm_after_a_sum_is_nothing_the_passes_match():
    """They match vLLM's sum followed by vLLM's norm; both are other operators here. vLLM's operators are kept whole in
    the graph, which an engine on a CPU turns off."""
    from vllm import ir
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from jetrl_verl.rollout.shared_operations import _share

    x, residual = torch.randn(2, 3, 256).bfloat16()
    with set_current_vllm_config(VllmConfig()), ir.enable_torch_wrap(True):
        stock, shared = RMSNorm(256, dtype=torch.bfloat16), RMSNorm(256, dtype=torch.bfloat16)
        _share(shared)
        for arguments in ((x,), (x, residual)):
            names = operations_in(lambda *a: stock(*a), *arguments)
            assert any("vllm_ir" in name for name in names), names
            names = operations_in(lambda *a: shared(*a), *arguments)
            assert any(name.startswith("jetrl.") for name in names)
            assert not any("vllm" in name for name in names), names

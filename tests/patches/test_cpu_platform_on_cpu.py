# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Patches of the CPU platform: process group, FSDP, reloadable BF16 weights, forked processes, hybrid models."""

import os
from types import SimpleNamespace

import pytest
import torch

from jetrl_verl.patches import fork_on_cpu, fsdp_on_cpu, hybrid_on_cpu, process_group_on_cpu, reloadable_weights_on_cpu


@pytest.mark.parametrize(("requested", "used"), [(None, "gloo"), ("cpu:gloo", "cpu:gloo")])
def test_the_process_group_uses_gloo_on_the_cpu(cpu_platform, monkeypatch, requested, used):
    from verl.utils import distributed

    process_group_on_cpu.PROCESS_GROUP.apply()
    passed = {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **arguments: passed.update(arguments))
    distributed.initialize_global_process_group_ray(timeout_second=None, backend=requested)
    assert passed["backend"] == used


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_on_the_cpu_a_reference_policy_uses_no_pinned_memory(cpu_platform, monkeypatch, device):
    from verl.utils import device as verl_device
    from verl.utils import fsdp_utils

    fsdp_on_cpu.NO_PINNED_MEMORY.apply()
    model = SimpleNamespace(_no_split_modules=["Layer"])
    policies = []
    monkeypatch.setattr(verl_device, "get_device_name", lambda: device)
    monkeypatch.setattr(fsdp_utils, "_select_fsdp2_wrap_targets", lambda model, names: [])
    monkeypatch.setattr(fsdp_utils, "fully_shard", lambda module, offload_policy: policies.append(offload_policy))
    fsdp_utils.apply_fsdp2(model, {"offload_policy": "pinned"}, {})
    assert policies == [None if device == "cpu" else "pinned"]


@pytest.mark.parametrize(("device", "loads"), [("cpu", 0), ("cuda", 1)])
def test_only_on_the_cpu_an_fsdp1_model_is_not_loaded_to_a_device(cpu_platform, monkeypatch, device, loads):
    from verl.utils import device as verl_device
    from verl.utils import fsdp_utils

    fsdp_on_cpu.NOTHING_TO_LOAD.apply()
    loaded = []
    monkeypatch.setattr(verl_device, "get_device_name", lambda: device)
    monkeypatch.setattr(fsdp_utils, "fsdp_version", lambda model: 2)
    monkeypatch.setattr(fsdp_utils, "load_fsdp2_model_to_gpu", loaded.append)
    fsdp_utils.load_fsdp_model_to_gpu("model")
    assert loaded == ["model"] * loads


@pytest.mark.parametrize("on_cpu_platform", [True, False])
def test_a_bf16_weight_stays_reloadable_by_a_weight_sync(monkeypatch, on_cpu_platform):
    from vllm.model_executor.layers import utils

    reloadable_weights_on_cpu.KEEP_WEIGHT.apply()
    if on_cpu_platform:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    else:
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    weight = layer.weight
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(layer.cpu_linear(x, weight, None), torch.nn.functional.linear(x, weight))
    assert (layer.cpu_linear is torch.nn.functional.linear) == on_cpu_platform
    if on_cpu_platform:
        assert layer.weight is weight and weight.shape == (64, 64)


OLD_EXPERTS = pytest.mark.skipif(not reloadable_weights_on_cpu.KEEP_EXPERTS.applies, reason="of vLLM 0.24")
NEW_EXPERTS = pytest.mark.skipif(not reloadable_weights_on_cpu.PACK_AT_CALL.applies, reason="of vLLM 0.29")


@pytest.fixture
def bf16_experts(monkeypatch):
    """As on a processor with AMX, where vLLM packs experts."""
    for patch in reloadable_weights_on_cpu.PATCHES:
        patch.apply()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.ops._C, "prepack_moe_weight", object(), raising=False)
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(torch.randn(4, 128, 64).bfloat16() / 8, requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.randn(4, 64, 64).bfloat16() / 8, requires_grad=False)
    return layer


@OLD_EXPERTS
def test_bf16_experts_stay_reloadable_by_a_weight_sync(bf16_experts):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    weight, x = bf16_experts.w13_weight, torch.randn(3, 64).bfloat16()
    weight.weight_loader = loader = object()
    moe = CPUFusedMOE(bf16_experts)
    assert bf16_experts.w13_weight is weight and weight.weight_loader is loader
    # The next product reads what a weight sync writes.
    weights, experts = torch.full((3, 1), 1.0), torch.tensor([[2]] * 3, dtype=torch.int32)
    before = moe.forward_method(bf16_experts, x, weights, experts, MoEActivation.SILU, 4)
    weight.data.mul_(2)
    after = moe.forward_method(bf16_experts, x, weights, experts, MoEActivation.SILU, 4)
    assert not torch.equal(after, before)


@OLD_EXPERTS
@pytest.mark.parametrize(("platform", "packs"), [("cpu", (False, "none")), ("nvidia", (True, "amx"))])
def test_bf16_experts_are_packed_except_on_the_cpu_platform(monkeypatch, bf16_experts, platform, packs):
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    monkeypatch.setenv("VERL_PLATFORM", platform)
    assert CPUFusedMOE.check_grouped_gemm(CPUFusedMOE.__new__(CPUFusedMOE), bf16_experts) == packs


@NEW_EXPERTS
@pytest.mark.parametrize("platform", ["cpu", "nvidia"])
def test_bf16_experts_keep_their_parameters_on_the_cpu_platform(monkeypatch, bf16_experts, platform):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def pack(method, layer, w13, w2):
        layer.w13_weight = torch.nn.Parameter(w13 + 1, requires_grad=False)

    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", pack)
    method, weight = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod), bf16_experts.w13_weight
    method.unquantized_backend = None
    method.process_weights_after_loading(bf16_experts)
    assert (bf16_experts.w13_weight is weight) == (platform == "cpu")


@NEW_EXPERTS
@pytest.mark.parametrize("inner", [64, 48], ids=["aligned", "padded by vLLM"])
def test_bf16_experts_multiply_with_their_parameters(monkeypatch, inner):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    reloadable_weights_on_cpu.PACK_AT_CALL.apply()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    experts = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    experts.quant_config = FusedMoEQuantConfig.make()
    experts.moe_config = SimpleNamespace(
        intermediate_size_per_partition=inner, activation=MoEActivation.SILU, experts_per_token=1
    )
    vars(experts).update(use_grouped_topk=False, renormalize=True, scoring_func="softmax")
    vars(experts).update(custom_routing_function=None, _use_zentorch=False)
    gate_up, down = torch.randn(4, 2 * inner, 64).bfloat16() / 8, torch.randn(4, 64, inner).bfloat16() / 8
    x, logits = torch.randn(3, 64).bfloat16(), torch.tensor([[0.0, 0.0, 9.0, 0.0]] * 3)
    for _ in range(2):
        y = experts.apply(x, gate_up, down, logits, MoEActivation.SILU, 4, None, None, False)
        gate, up = (x @ gate_up[2].T).float().chunk(2, dim=-1)
        expected = (torch.nn.functional.silu(gate) * up) @ down[2].float().T
        torch.testing.assert_close(y.float(), expected, atol=0.05, rtol=0.05)
        gate_up.mul_(2)  # as a weight sync writes


@pytest.mark.parametrize(("platform", "method"), [("cpu", "fork"), ("nvidia", "spawn")])
def test_engine_processes_fork_only_on_the_cpu_platform(monkeypatch, platform, method):
    from vllm.utils import system_utils

    fork_on_cpu.FORK.apply()
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    system_utils._maybe_force_spawn()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method


@pytest.mark.skipif(not hybrid_on_cpu.COPY_STATES.applies, reason="of vLLM 0.24")
def test_vllm_0_24_runs_hybrids_on_the_cpu_as_0_29_does(monkeypatch):
    from vllm.config.model import ModelConfig
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for patch in hybrid_on_cpu.PATCHES:
        patch.apply()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert ModelConfig.__new__(ModelConfig).get_num_layers_by_block_type(None, "linear_attention") == 0
    states = torch.arange(12.0).view(4, 3)
    addresses = (torch.tensor([states[i].data_ptr() for i in rows], dtype=torch.uint64) for rows in ((0, 1), (2, 3)))
    mamba_utils.batch_memcpy(*addresses, torch.tensor([12, 8], dtype=torch.int32))
    assert states[2:].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 11.0]]

    runner, pages = CPUModelRunner.__new__(CPUModelRunner), torch.full((3, 2), torch.nan)
    layers = {"attention": SimpleNamespace(kv_cache=pages), "delta_net": SimpleNamespace(kv_cache=[states])}
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[n]) for n in layers])
    runner._zero_block_ids([0, 2])
    assert pages.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2] and states[0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("platform", ["cpu", "nvidia"])
def test_only_on_the_cpu_platform_a_delta_net_reads_its_weight_as_it_is_loaded(monkeypatch, platform):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    hybrid_on_cpu.READ_UNPACKED.apply()
    monkeypatch.setenv("VERL_PLATFORM", platform)
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    gdn_attention.register_cpu_gdn_attention_ops()
    assert torch.cpu._is_amx_tile_supported() == torch.cpu._is_avx512_bf16_supported() == (platform != "cpu")

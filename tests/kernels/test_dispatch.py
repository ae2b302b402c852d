# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of backends and the operator, on the CPU."""

from functools import partial

import pytest
import torch
from contract_inputs import gaussian

from jetrl_verl import formats, kernels, reference
from jetrl_verl.kernels import dispatch

GPU = torch.device("cuda:0")
ROWS = {name: operation.backends for name, operation in kernels.OPERATIONS.items()}


@pytest.fixture
def gpu_of(monkeypatch):
    """Makes ``cuda:0`` a GPU of this compute capability."""

    def make(*capability: int) -> None:
        dispatch.platform_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")

    yield make
    dispatch.platform_of.cache_clear()
    dispatch._warn_untested.cache_clear()


def test_every_operation_has_a_backend_on_the_cpu_and_on_hopper():
    """Two are for the CPU alone, since vLLM computes them on a GPU."""
    for operation, row in ROWS.items():
        assert set(row) in ({"cpu", "sm90"}, {"cpu"}), operation
        assert row["cpu"] in (("reference",), ("composed",), ("sdpa",))
    assert sum(set(row) == {"cpu"} for row in ROWS.values()) == 2


def test_the_last_backend_of_an_entry_supports_every_call():
    for operation, row in ROWS.items():
        if row == dispatch.NATIVE_ALONE:
            continue
        attention = {"flash_attention_3", "flash_attention_2", "sdpa"}
        own = attention if "attention" in operation else {"triton", "composed"}
        for names in row.values():
            assert names[-1] in {"reference"} | own
            assert dispatch.supports(operation, names[-1])


def test_the_delta_rule_alone_has_no_backend_without_the_native_kernels():
    names = {operation for operation, row in ROWS.items() if row == dispatch.NATIVE_ALONE}
    assert names == {"gated_delta_rule", "gated_delta_rule_update"}


def test_backends_that_differ_in_the_last_bit_are_listed():
    assert [name for name, operation in kernels.OPERATIONS.items() if not operation.equal_bits] == ["varlen_attention"]


def test_cpu_only_operations_raise_on_a_gpu(gpu_of):
    for capability, platform in (((9, 0), "sm90"), ((10, 0), "gpu")):
        gpu_of(*capability)
        with pytest.raises(RuntimeError, match=rf"paged_attention has no backend on {platform}\. Use it on a CPU\."):
            dispatch.lookup("paged_attention", GPU)
        assert "paged_attention" not in kernels.describe_backends("cuda:0")


def test_describe_names_what_runs_on_the_cpu():
    described = kernels.describe_backends("cpu")
    assert set(described) == set(kernels.OPERATIONS) and described["rms_norm"] == "reference"
    assert set(described.values()) == {"reference", "composed", "sdpa"}


def test_a_gpu_without_fp8_raises(gpu_of):
    gpu_of(8, 0)
    refused = pytest.raises(RuntimeError, match=r"NVIDIA X has compute capability 8.0 .* use precision=bf16")
    with refused:
        kernels.describe_backends("cuda:0")
    with refused:
        dispatch.lookup("rms_norm", GPU)
    assert callable(dispatch.lookup("varlen_attention", GPU))


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_gpus_get_the_last_backend_and_one_warning(gpu_of, capsys, capability):
    gpu_of(*capability)
    assert dispatch.platform_of(GPU) == "gpu"
    described = kernels.describe_backends("cuda:0")
    assert {described[name] for name in ("gemm_nt", "wgrad", "gemm_int8", "rms_norm", "relayout_128x1")} == {"triton"}
    assert callable(dispatch.lookup("rms_norm", GPU))
    assert capsys.readouterr().err == "jetrl_verl: not tested on this GPU (NVIDIA X); Triton's kernels run.\n"


def test_hopper_gets_every_backend_without_a_warning(gpu_of, capsys):
    gpu_of(9, 0)
    assert kernels.describe_backends("cuda:0")["gemm_nt"] == "native, else vllm_cutlass, else triton"
    assert capsys.readouterr().err == ""


def test_another_kind_of_device_raises():
    with pytest.raises(RuntimeError, match="not on 'meta'; use precision=bf16"):
        kernels.platform_of(torch.device("meta"))


def test_an_override_lasts_for_its_block_and_nests():
    with kernels.override_backend("gemm_nt", "vllm_cutlass"):
        assert kernels.describe_backends("cpu")["gemm_nt"] == "vllm_cutlass"
        with kernels.override_backend("gemm_nt", "triton"):
            assert kernels.describe_backends("cpu")["gemm_nt"] == "triton"
        assert kernels.describe_backends("cpu")["gemm_nt"] == "vllm_cutlass"
    assert kernels.describe_backends("cpu")["gemm_nt"] == "reference"


@pytest.mark.parametrize("names", [("gemm", "triton"), ("gemm_nt", "cutlass")])
def test_an_unknown_override_raises(names):
    with pytest.raises(ValueError, match="no backend"), kernels.override_backend(*names):
        pass


def test_an_external_gemm_raises_for_unsupported_calls():
    a, b = kernels.quantize_1x128(gaussian(4, 256), "fp32"), kernels.quantize_128x128(gaussian(256, 256), "fp32")
    with (
        kernels.override_backend("gemm_nt", "vllm_cutlass"),
        pytest.raises(ValueError, match=r"vllm_cutlass does not support gemm_nt of .*\(4, 256\).*use backend triton"),
    ):
        kernels.gemm_nt(a, b, torch.zeros(256))


FPROPS = {
    **{rule: ("fprop", partial(kernels.quantize_128x128, rule=rule), [rule]) for rule in reference.SCALE_RULES},
    "int8": ("fprop_int8", kernels.quantize_int8, []),
}
"""FProp, the quantizer of its weight, and its last arguments."""


@pytest.mark.parametrize("name", FPROPS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_fprop_is_quantize_then_gemm(name, with_bias):
    (operation, quantize, rule), x = FPROPS[name], gaussian(6, 300)
    w, bias, run = quantize(gaussian(130, 300)), gaussian(1, 130)[0] if with_bias else None, getattr(kernels, operation)
    if rule:
        want = reference.gemm_nt(reference.quantize_1x128(x, *rule), w, bias)
    else:
        want = reference.gemm_int8(reference.quantize_int8(x), w, bias=bias)
    for shape in ((6,), (2, 3)):
        assert torch.equal(run(x.view(*shape, 300), *w, bias, *rule), want.view(*shape, 130))
    assert run(x[:0], *w, bias, *rule).shape == (0, 130)


def test_only_a_rollout_sets_static_weight(monkeypatch):
    """Only the caller sets it, so a trainer, which quantizes its weight right before, never does."""
    received = []

    def product(call):
        received.append(call.static_weight)
        return reference.multiply(call)

    monkeypatch.setitem(dispatch._implementations, ("gemm_nt", "native"), dispatch.Implementation(product))
    x, w = gaussian(6, 256), kernels.quantize_128x128(gaussian(130, 256), "fp32")
    qdata = kernels.quantize_1x128(x, "fp32")
    with kernels.override_backend("gemm_nt", "native"):
        for options in ({}, {"static_weight": True}):
            kernels.fprop(x, w.qdata, w.scales, None, "fp32", **options)
            kernels.fprop_quantized(qdata, w.qdata, w.scales, None, **options)
    assert received == [False, False, True, True]


def test_only_a_rollout_sets_static_segments(monkeypatch):
    """Segments are older than the kernel before the second product, not than the one before the first."""
    received = []

    def product(a, b, start, align, *static):
        received.append(static)
        return reference.grouped_gemm_nt(a, b, start)

    monkeypatch.setitem(dispatch._implementations, ("grouped_gemm_nt", "native"), dispatch.Implementation(product))
    flow, x, logits = formats.get(formats.FLOW), gaussian(5, 256), gaussian(5, 4).float()
    shapes = (4, 256, 256), (4, 256, 128)
    gate_up, down = (flow.quantize_weight(gaussian(4 * n, k).view(-1, n, k), "fp32") for _, n, k in shapes)
    weights, segments, rows = kernels.route_and_permute(logits, flow.quantize_activation(x, "fp32"), 2, True)
    with kernels.override_backend("grouped_gemm_nt", "native"):
        for options in ({}, {"static_weight": True}):
            flow.experts(rows, weights, segments, gate_up, down, "fp32", **options)
    assert received == [(False, False)] * 2 + [(True, False), (True, True)]


@pytest.mark.parametrize("name", FPROPS)
def test_fprop_raises_for_wrong_inputs(name):
    operation, quantize, rule = FPROPS[name]
    run, (qdata, scales) = getattr(kernels, operation), quantize(gaussian(130, 256))
    with pytest.raises(ValueError, match="quantized from BF16 values"):
        run(torch.zeros(2, 256), qdata, scales, None, *rule)
    with pytest.raises(ValueError, match="does not fit the weight"):
        run(gaussian(2, 128), qdata, scales, None, *rule)
    if not rule:
        with pytest.raises(ValueError, match="weight qdata is torch.float32, expected torch.int8"):
            run(gaussian(2, 256), qdata.float(), scales, None)

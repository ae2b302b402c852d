# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An operator is a torch operator to everybody who looks, and its function to nobody else; operands that do not fit."""

from contextlib import nullcontext

import pytest
import torch
from contract_inputs import gaussian
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_int8 import cutlass_supports_gemm_int8
from jetrl_verl.kernels.rms_norm import _rms_norm
from jetrl_verl.reference import QuantizedTensor

X, WEIGHT = torch.randn(3, 128).bfloat16(), torch.ones(128).bfloat16()


class Names:
    """A mode's record of what it sees."""

    def record(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", ()), str(func)]
        return func(*args, **(kwargs or {}))


class Seen(Names, TorchDispatchMode):
    __torch_dispatch__ = Names.record


class Asked(Names, TorchFunctionMode):
    __torch_function__ = Names.record


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of this package's torch operators that are called as operators."""
    names = []
    packet = type(torch.ops.jetrl.rms_norm)
    own = packet.__call__
    monkeypatch.setattr(packet, "__call__", lambda self, *a, **k: names.append(self.__name__) or own(self, *a, **k))
    return names


@pytest.mark.parametrize("grad", [False, True])
def test_without_gradients_the_function_is_called(calls, grad):
    with torch.set_grad_enabled(grad):
        y, rstd = _rms_norm(X, WEIGHT, 1e-6)
    assert calls == (["rms_norm"] if grad else [])
    with torch.enable_grad():
        same = _rms_norm(X, WEIGHT, 1e-6)
    assert torch.equal(y, same[0]) and torch.equal(rstd, same[1])


def test_a_mode_sees_the_operator():
    for mode in (Seen(), Asked()):
        with torch.no_grad(), mode:
            _rms_norm(X, WEIGHT, 1e-6)
        assert any("rms_norm" in name for name in mode.names), mode.names


def test_fake_tensors_reach_the_fake():
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        y, rstd = _rms_norm(torch.empty(5, 128, dtype=torch.bfloat16), WEIGHT, 1e-6)
    assert y.shape == (5, 128) and rstd.shape == (5,)


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_torch_compile_does_not_trace_into_the_operator(context):
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    with context():
        y, _ = torch.compile(lambda x: _rms_norm(x, WEIGHT, 1e-6), backend=backend, fullgraph=True)(X)
        assert torch.equal(y, _rms_norm(X, WEIGHT, 1e-6)[0])
    assert "jetrl.rms_norm" in graphs[0]


def test_functionalize_sees_the_operator(calls):
    with torch.no_grad():
        torch.func.functionalize(lambda x: _rms_norm(x, WEIGHT, 1e-6)[0])(X)
    assert calls == ["rms_norm"]


def test_torch_sees_a_quantized_tensor_as_two_tensors(calls):
    with torch.enable_grad():
        rowwise, colwise = kernels.quantize_1x128_and_128x1(X, "fp32")
        back = kernels.relayout_128x1(rowwise, "fp32")
    assert calls == ["quantize_1x128_and_128x1", "relayout_128x1"]
    assert all(isinstance(q, QuantizedTensor) for q in (rowwise, colwise, back))
    with torch.no_grad():
        unwatched = kernels.relayout_128x1(kernels.quantize_1x128(X, "fp32"), "fp32")
    assert torch.equal(back.qdata.view(torch.uint8), unwatched.qdata.view(torch.uint8))
    assert torch.equal(back.scales, unwatched.scales)
    schema = torch.ops.jetrl.relayout_128x1.default._schema
    assert str(schema) == "jetrl::relayout_128x1(Tensor q_qdata, Tensor q_scales, str rule) -> (Tensor, Tensor)"


@pytest.mark.parametrize(
    ("operator", "quantize", "rule"),
    [("fprop", lambda w: kernels.quantize_128x128(w, "fp32"), ["fp32"]), ("fprop_int8", kernels.quantize_int8, [])],
)
def test_fprop_stays_one_node_under_torch_compile_with_dynamic_shapes(operator, quantize, rule):
    weight, scales = quantize(torch.randn(130, 256).bfloat16())
    fprop, graphs = getattr(kernels, operator), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(x):
        return fprop(x * 2, weight, scales, None, *rule) + 1

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for m in (3, 5):
        x = torch.randn(m, 256).bfloat16()
        assert torch.equal(compiled(x), layer(x))
    nodes = [node.target for node in graphs[0].graph.nodes]
    assert nodes.count(getattr(torch.ops.jetrl, operator)) == len(graphs) == 1


def test_torch_compile_passes_quantized_tensors_through_operators():
    weight = kernels.quantize_128x128(torch.randn(256, 128).bfloat16(), "fp32")
    blocks = kernels.quantize_128x128(torch.randn(4 * 128, 128).bfloat16(), "fp32")
    experts = QuantizedTensor(blocks.qdata.view(4, 128, 128), blocks.scales.view(4, 1, 1))
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    def layer(x):
        rows, total = kernels.add_rms_norm_quantize_1x128(x, x, WEIGHT, 1e-6, "fp32", with_normed=False)
        hidden = kernels.fprop_quantized(rows, weight.qdata, weight.scales, None, static_weight=True)
        product = kernels.silu_mul_quantize(*hidden.chunk(2, -1), "fp32", with_product=False)
        logits = kernels.gemm_nt(product, weight, out_dtype=torch.float32)[:, :4]
        weights, segments, permuted = kernels.route_and_permute(logits, product, 2, True)
        return kernels.grouped_gemm_nt(permuted, experts, segments.start), weights, total

    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        for rows in (8, 9, 17):
            x = torch.randn(rows, 128).bfloat16()
            for got, want in zip(compiled(x), layer(x), strict=True):
                assert torch.equal(got, want)
    names = ("add_rms_norm_quantize_1x128", "fprop_quantized", "silu_mul_quantize", "gemm_nt")
    assert len(graphs) == 1
    assert all(f"jetrl.{name}" in graphs[0] for name in (*names, "route_and_permute", "grouped_gemm_nt"))


def test_arguments_may_be_left_out_where_the_schema_has_them():
    a = kernels.quantize_1x128(torch.randn(4, 256).bfloat16(), "fp32")
    b = kernels.quantize_128x128(torch.randn(128, 256).bfloat16(), "fp32")
    with torch.enable_grad():
        watched = kernels.gemm_nt_of_ranks(a, b, 2)
    with torch.no_grad():
        assert torch.equal(kernels.gemm_nt_of_ranks(a, b, 2, None), watched)


def test_mismatched_operands_raise():
    x, where = torch.zeros(4, 200, dtype=torch.bfloat16), reference.segments(torch.zeros(4, 1, dtype=torch.int32), 2, 1)
    with pytest.raises(ValueError, match="not whole groups of 128"):
        kernels.gather_quantize_1x128_and_128x1(x, where.pair, 1, "fp32")
    quantized = reference.quantize_1x128(torch.zeros(4, 256), "fp32")
    with pytest.raises(ValueError, match="4 rows are not whole groups of 128; align segments to 128"):
        kernels.gather_relayout_128x1(quantized, where.pair, 1, "fp32")
    with pytest.raises(TypeError, match="x is torch.float32"):
        kernels.gather_quantize_1x128_and_128x1(torch.zeros(4, 256), where.pair, 1, "fp32")
    with pytest.raises(ValueError, match="k=3"):
        kernels.route_and_permute(torch.zeros(4, 2), quantized, 3, True)
    a, b = (
        reference.quantize_1x128(torch.zeros(4, 384), "fp32"),
        reference.quantize_128x128(torch.zeros(256, 384), "fp32"),
    )
    b = reference.QuantizedTensor(b.qdata.view(2, 128, 384), b.scales.view(2, 1, 3))
    with pytest.raises(ValueError, match="K = 384 does not divide into 2 slices of multiples of 128"):
        kernels.grouped_gemm_nt_of_ranks(a, b, where.start, 2)
    with pytest.raises(TypeError, match=r"combine_of_ranks: y is torch.float32"):
        kernels.combine_of_ranks(torch.zeros(2, 4, 128), where.row)
    with pytest.raises(ValueError, match="got .5, 2. torch.float32, .4, 256. and k=1"):
        kernels.route_and_permute(torch.zeros(5, 2), quantized, 1, True)


def test_what_cutlass_supports(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    a, b = kernels.quantize_int8(gaussian(3, 256)), kernels.quantize_int8(gaussian(64, 256))
    assert cutlass_supports_gemm_int8(a, b)
    assert cutlass_supports_gemm_int8(a, b, bias=gaussian(1, 64)[0])
    assert not cutlass_supports_gemm_int8(a, b, bias=torch.zeros(64)), "its bias has the type of the result"
    assert not cutlass_supports_gemm_int8(a, b, out_dtype=torch.float32)
    assert not cutlass_supports_gemm_int8(a, kernels.quantize_int8(gaussian(65, 256)))

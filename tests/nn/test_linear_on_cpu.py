# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 linear: every GEMM against float64, saved bytes, quantizations, refusals."""

import copy
from collections import Counter

import pytest
import torch
from test_experts_on_cpu import difference, saved
from tiny_models import FAMILIES, tiny_config, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetrl_verl import formats, kernels
from jetrl_verl.models.plan import UnsupportedLayer, plan_linears
from jetrl_verl.nn.linear import JetLinear, SharedColwise, quantize_input
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.reference import (
    QuantizedTensor,
    dequantize_1x128,
    dequantize_128x128,
    quantize_1x128,
    quantize_128x1,
    quantize_128x128,
)

SHAPES = [(1, 128, 128), (70, 256, 384), (129, 384, 128), (300, 128, 256)]
RULES = ["fp32", "pow2"]
FLOW = formats.get("fp8")


def make(
    k: int, n: int, bias: bool = True, rule: str = "fp32", backward: str = "fp8", dtype=torch.float32
) -> JetLinear:
    torch.manual_seed(k + n)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    return JetLinear.replace(linear, FLOW, scale_rule=rule, backward=backward)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_each_gemm_equals_the_contract_in_float64(m, k, n, rule):
    """Y, dX and dW against float64 products of the contract's dequantized operands."""
    layer = make(k, n, rule=rule)
    x = torch.randn(m, k).bfloat16().requires_grad_()
    dy = torch.randn(m, n).bfloat16()
    y = layer(x)
    y.backward(dy)

    w = dequantize_128x128(quantize_128x128(layer.weight.detach().bfloat16(), rule)).double()
    xq = quantize_1x128(x.detach(), rule)
    x_colwise = dequantize_1x128(kernels.relayout_128x1(xq, rule)).double()
    dy_rowwise = dequantize_1x128(quantize_1x128(dy, rule)).double()
    dy_colwise = dequantize_1x128(quantize_128x1(dy, rule)).double()
    assert difference(y, dequantize_1x128(xq).double() @ w.t() + layer.bias.detach().double()) < 2.5e-3
    assert difference(x.grad, dy_rowwise @ w) < 2.5e-3
    assert difference(layer.weight.grad, dy_colwise @ x_colwise.t()) < 2.5e-3
    assert difference(layer.bias.grad, dy.double().sum(0)) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_forward_rounds_like_the_ranks_of_a_rollout(ranks, bias):
    """Each rank's product over its slice of K is rounded; they are added in FP32 in rank order and rounded once."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 256, bias=bias)
    layer = JetLinear.replace(linear, FLOW, scale_rule="fp32", backward="fp8", ranks=ranks)
    x, dy = torch.randn(70, 512).bfloat16().requires_grad_(), torch.randn(70, 256).bfloat16()
    y = layer(x)
    w, width = layer.weight.detach().bfloat16(), 512 // ranks
    total = torch.zeros(70, 256)
    for rank in range(ranks):
        shard = quantize_128x128(w[:, rank * width : (rank + 1) * width].contiguous(), "fp32")
        added = layer.bias.detach().bfloat16() if bias and rank == 0 else None
        piece = x.detach()[:, rank * width : (rank + 1) * width].contiguous()
        total += kernels.fprop(piece, shard.qdata, shard.scales, added, "fp32").float()
    assert torch.equal(y, total.bfloat16())
    with torch.no_grad():
        assert torch.equal(layer(x), y)
        whole = copy.deepcopy(layer)
        whole.ranks = 1
        assert not torch.equal(whole(x), y), "the order of rounding shows"
    y.backward(dy)
    again = x.detach().requires_grad_()
    whole(again).backward(dy)
    assert torch.equal(x.grad, again.grad) and torch.equal(layer.weight.grad, whole.weight.grad)


def test_the_plan_gives_row_parallel_layers_their_ranks():
    model = tiny_model("qwen3", hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    replace_linears(model, plan_linears(model.config, tp=2), scale_rule="fp32")
    ranks = Counter((type(m).__name__, m.ranks) for m in model.modules() if isinstance(m, JetLinear))
    assert ranks == {("JetLinear", 1): 10, ("JetLinear", 2): 4}


def test_bf16_backward_is_straight_through():
    layer = make(256, 128, backward="bf16")
    x = torch.randn(40, 256).bfloat16().requires_grad_()
    dy = torch.randn(40, 128).bfloat16()
    y = layer(x)
    assert torch.equal(y, make(256, 128)(x.detach()))
    y.backward(dy)
    assert torch.equal(x.grad, dy @ layer.weight.detach().bfloat16())
    assert torch.equal(layer.weight.grad, (dy.t() @ x.detach()).float())


def test_forward_equals_vllms_operator_with_and_without_gradient():
    layer = make(256, 128)
    x = torch.randn(3, 5, 256).bfloat16()
    w = quantize_128x128(layer.weight.detach().bfloat16(), "fp32")
    expected = kernels.fprop(x, w.qdata, w.scales, layer.bias.detach().bfloat16(), "fp32")
    assert torch.equal(layer(x), expected)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_parameter_dtype_do_not_change_the_result(dtype):
    layer = make(128, 128).to(dtype)
    x = torch.randn(9, 128)
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(x)
    assert plain.dtype == cast.dtype == torch.bfloat16
    assert torch.equal(plain, cast)
    plain.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


def test_empty_batch():
    layer = make(128, 256)
    x = torch.empty(0, 128).bfloat16().requires_grad_()
    y = layer(x)
    assert y.shape == (0, 256)
    y.sum().backward()
    assert x.grad.shape == (0, 128)
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


def test_nan_reaches_the_gradient():
    """verl skips a step whose gradient norm is not finite; the layer must not turn NaN into a number."""
    layer = make(128, 128)
    x = torch.randn(4, 128).bfloat16()
    x[1, 3] = torch.nan
    y = layer(x.requires_grad_())
    y.float().sum().backward()
    assert y[1].isnan().all() and y[0].isfinite().all()
    assert layer.weight.grad.isnan().any()


def test_accumulated_gradients_are_a_sum_and_share_one_quantization():
    layer = make(128, 256)
    batches = [torch.randn(50, 128).bfloat16() for _ in range(3)]
    total = torch.zeros_like(layer.weight)
    for x in batches:
        single = copy.deepcopy(layer)
        single(x).float().square().sum().backward()
        total += single.weight.grad
    for x in batches:
        layer(x).float().square().sum().backward()
    assert torch.equal(layer.weight.grad, total)
    assert layer.quantizations == 1


def test_an_optimizer_step_requantizes_the_weight():
    layer = make(128, 128, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x = torch.randn(8, 128).bfloat16()
    before = layer(x)
    before.float().square().sum().backward()
    assert layer.quantizations == 1
    optimizer.step()
    after = layer(x)
    assert layer.quantizations == 2
    assert not torch.equal(before, after)
    assert torch.equal(after, copy.deepcopy(layer)(x))


def saved_bytes(module: nn.Module, function) -> int:
    return sum(tensor.nbytes for tensor in saved(module, function))


def test_the_saved_activation_has_half_the_bytes_of_bf16():
    m, k, n = 1024, 512, 256
    x = torch.randn(m, k).bfloat16().requires_grad_()
    layer = make(k, n, bias=False)
    stock = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    fp8, bf16 = saved_bytes(layer, lambda: layer(x)), saved_bytes(stock, lambda: stock(x))
    assert bf16 == 2 * m * k
    assert fp8 == m * k + 4 * m * k // 128


def test_a_second_derivative_is_refused():
    """Autograd would silently ignore the path through the qdata."""
    layer, x = make(128, 128), torch.randn(4, 128).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


@pytest.mark.parametrize("backward", ["fp8", "bf16"])
def test_a_weight_changed_between_forward_and_backward_is_refused(backward):
    """The weight is saved by reference, outside autograd's version check."""
    layer, x = make(128, 128, backward=backward), torch.randn(4, 128)
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(
        RuntimeError, match=r"\(128, 128\).* modified by an inplace operation: it is at version 2; expected version 1"
    ):
        y.sum().backward()


def test_an_assigned_parameter_is_the_weight():
    layer, seen = make(128, 256), []
    other = nn.Parameter(torch.randn(256, 128))
    layer(torch.randn(4, 128))
    assert layer.holds_qdata
    layer.weight = other
    assert layer.weight is other and dict(layer.named_parameters())["weight"] is other and not layer.holds_qdata
    with nn.modules.module.register_module_parameter_registration_hook(lambda *call: seen.append(call)):
        layer.weight = other
    assert seen == [(layer, "weight", other)]
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = torch.randn(256, 128)
    del layer.weight
    layer.weight = torch.randn(256, 128)  # as FSDP1 does
    assert not layer.holds_qdata and "weight" not in dict(layer.named_parameters())
    layer._parameters["weight"] = nn.Parameter(torch.randn(256, 128))  # in both places, as FSDP1 has it in a forward
    layer.weight = other
    assert dict(layer.named_parameters())["weight"] is other and layer.weight is other


def test_weights_of_inference_mode_are_quantized_for_every_call():
    """Inference tensors have no version counter."""
    with torch.inference_mode():
        layer, x = make(128, 128), torch.randn(4, 128)
        before = layer(x)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), before)
    assert layer.quantizations == 2


def test_a_write_past_the_version_counter_needs_drop_qdata():
    layer, x = make(128, 128), torch.randn(4, 128)
    before = layer(x)
    layer.weight.data.mul_(2)
    layer.drop_qdata()
    assert not torch.equal(layer(x), before)


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Counts quantizations and re-layouts of X."""
    counted = Counter()

    def count(name: str) -> None:
        stock = getattr(kernels, name)

        def function(*args):
            counted[name] += 1
            return stock(*args)

        monkeypatch.setattr(kernels, name, function)

    for name in ("quantize_1x128", "relayout_128x1", "gather_relayout_128x1"):
        count(name)
    return counted


def three_layers(rule: str = "fp32", backward: str = "fp8") -> list[JetLinear]:
    """q, k and v of one input."""
    return [make(256, n, rule=rule, backward=backward) for n in (256, 128, 384)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backward", ["fp8", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_layers_of_one_input_quantize_it_once_and_compute_the_same(calls, rule, backward, checkpointed):
    def block(layers, x):
        # As the preceding norm does, so a recomputed forward quantizes again.
        x = quantize_input(x, layers[0].format, layers[0].scale_rule)
        return torch.cat([layer(x) for layer in layers], dim=-1)

    x, dy = torch.randn(3, 50, 256).bfloat16(), torch.randn(3, 50, 768).bfloat16()
    together, apart = three_layers(rule, backward), three_layers(rule, backward)
    shared, own = x.clone().requires_grad_(), [x.clone().requires_grad_() for _ in apart]
    y = checkpoint(block, together, shared, use_reentrant=False) if checkpointed else block(together, shared)
    y.backward(dy)
    assert calls == Counter(quantize_1x128=1 + checkpointed, relayout_128x1=int(backward == "fp8"))
    expected = torch.cat([layer(leaf) for layer, leaf in zip(apart, own, strict=True)], dim=-1)
    expected.backward(dy)
    assert torch.equal(y, expected)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.weight.grad, other.weight.grad)
        assert torch.equal(one.bias.grad, other.bias.grad)
    # Autograd adds the three gradients of X in BF16 in its own order.
    assert difference(shared.grad, sum(leaf.grad.double() for leaf in own)) < 2**-7


def test_layers_of_one_input_save_one_copy_of_its_qdata():
    layers = nn.ModuleList(three_layers())
    x = torch.randn(512, 256).bfloat16().requires_grad_()
    one = saved_bytes(layers, lambda: layers[0](x))
    assert one == 512 * 256 + 4 * 512 * 2
    shared = quantize_input(x, layers[0].format, "fp32")
    assert saved_bytes(layers, lambda: [layer(shared) for layer in layers]) == one


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_layer_quantizes_and_relays_out_four_inputs(calls, family, checkpointing):
    model = tiny_model(family)
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        # FP32 activations between the layers: gradients of q, k and v are summed in FP32 after their BF16 casts.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(tokens, use_cache=False).logits

    with torch.no_grad():
        expected = logits_of(torch.arange(6)[None])
    # In a mixture the activation quantizes for down, and the experts' segments re-lay out the input of gate and up.
    inputs, of_experts = (3, 1) if family == "qwen3_moe" else (4, 0)
    assert calls == Counter(quantize_1x128=inputs * 2)
    calls.clear()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    logits = logits_of(torch.arange(6)[None])
    assert torch.equal(logits, expected)
    logits.float().sum().backward()
    laid_out = {"relayout_128x1": (4 - of_experts) * 2, "gather_relayout_128x1": of_experts * 2}
    assert calls == Counter(quantize_1x128=(1 + checkpointing) * inputs * 2, **laid_out)


def test_every_layer_quantizes_a_plain_tensor_again(calls):
    layer, other = make(256, 128), make(256, 128, rule="pow2")
    x = torch.randn(4, 256).bfloat16()
    with torch.no_grad():
        layer(x)
        x[0] *= 2
        assert torch.equal(layer(x), copy.deepcopy(layer)(x.clone()))
        other(x)
        x.data = torch.randn(4, 256).bfloat16()
        layer(x)
    assert calls["quantize_1x128"] == 5


def test_a_quantized_input_is_not_quantized_again(calls):
    layers = three_layers()
    x = torch.randn(2, 5, 256).bfloat16()
    expected = [layer(x) for layer in layers]
    calls.clear()
    qdata, scales = quantize_1x128(x.reshape(10, 256), "fp32")
    quantized = QuantizedTensor(qdata, scales, x)
    assert quantized.shape == x.shape
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert all(torch.equal(layer(quantized), y) for layer, y in zip(layers, expected, strict=True))
    assert isinstance(quantized.colwise, SharedColwise) and not calls


def test_a_quantized_input_without_its_source_is_refused():
    qdata, scales = quantize_1x128(torch.randn(10, 256).bfloat16(), "fp32")
    with pytest.raises(ValueError, match="needs the source of a quantized input"):
        make(256, 128)(QuantizedTensor(qdata, scales))


def test_hooks_that_cast_inputs_do_not_change_quantized_data():
    from torch.distributed.utils import _apply_to_tensors
    from torch.utils._pytree import tree_map_only

    q = quantize_1x128(torch.randn(10, 256).bfloat16(), "fp32")
    for cast in (_apply_to_tensors, lambda function, x: tree_map_only(torch.Tensor, function, x)):
        (uncast,) = cast(lambda x: x.to(torch.bfloat16), (q,))
        assert uncast is q and uncast.qdata.dtype == torch.float8_e4m3fn


def test_a_norm_quantizes_only_while_all_its_readers_accept_it():
    model = tiny_model("llama")
    replace_linears(model, plan_linears(model.config), scale_rule="fp32")
    layer = model.model.layers[0]
    x = torch.randn(1, 3, layer.self_attn.q_proj.in_features).bfloat16()
    assert isinstance(layer.input_layernorm(x), QuantizedTensor)
    layer.self_attn.v_proj.__class__ = nn.Linear
    assert isinstance(layer.input_layernorm(x), torch.Tensor)
    assert isinstance(layer.post_attention_layernorm(x), QuantizedTensor)


def test_the_last_reader_frees_the_shared_re_layout(monkeypatch):
    from torch.multiprocessing.reductions import StorageWeakRef

    stock, storages = kernels.relayout_128x1, []

    def relayout(*args):
        columns = stock(*args)
        storages.append(StorageWeakRef(columns.qdata.untyped_storage()))
        return columns

    monkeypatch.setattr(kernels, "relayout_128x1", relayout)
    layers = three_layers()
    layers[1].weight.requires_grad_(False)
    x = torch.randn(130, 256).bfloat16().requires_grad_()
    shared = quantize_input(x, layers[0].format, "fp32")
    first, _, last = (layer(shared).float().sum() for layer in layers)
    first.backward(retain_graph=True)
    assert [storage.expired() for storage in storages] == [False]
    last.backward()
    assert [storage.expired() for storage in storages] == [True]
    gradient = layers[0].weight.grad.clone()
    first.backward()
    assert [storage.expired() for storage in storages] == [True, True]
    assert torch.equal(layers[0].weight.grad, 2 * gradient)


@pytest.mark.parametrize("family", FAMILIES)
def test_replacement_keeps_parameters_and_the_head(family):
    model = tiny_model(family)
    config = model.config
    before = dict(model.named_parameters())
    names = replace_linears(model, plan_linears(config), scale_rule="fp32")
    assert len(names) == (5 if family == "qwen3_moe" else 7) * config.num_hidden_layers
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert type(model.lm_head) is nn.Linear
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) == (family in ("qwen2", "seed_oss"))
    assert family == "qwen3_moe" or not model.model.layers[1].mlp.down_proj.bias
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_an_unfit_layer_is_named_or_skipped_with_its_group():
    config = tiny_config("qwen2", intermediate_size=192)
    with pytest.raises(UnsupportedLayer, match=r"mlp\.gate_proj .*192.*multiples of 128$"):
        plan_linears(config)
    plans = plan_linears(config, unfit_layers="skip")
    skipped = [suffix for suffix, plan in plans.items() if not plan.quantized]
    assert skipped == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    with pytest.raises(UnsupportedLayer, match="tensor parallel size 2"):
        plan_linears(tiny_config("qwen2", intermediate_size=384), tp=2)


def test_the_plan_of_another_model_is_refused():
    with pytest.raises(ValueError, match="do not belong together"):
        replace_linears(
            tiny_model("qwen2"), plan_linears(tiny_config("qwen2", intermediate_size=512)), scale_rule="fp32"
        )


@pytest.mark.parametrize("options", [{"scale_rule": "fp16"}, {"backward": "fp4"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ValueError, match="unknown|is not a backward precision"):
        JetLinear.replace(nn.Linear(128, 128), FLOW, **({"scale_rule": "fp32", "backward": "fp8"} | options))

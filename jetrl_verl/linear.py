# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The linear layer of the flow: ``nn.Linear`` whose three GEMMs run in FP8 and whose saved activation is FP8.

With X [M, K] the BF16 input, W [N, K] the weight and dY [M, N] the BF16 output gradient, every product is one NT GEMM
of the contract, contracted over the last dimension of both operands (Jet-RL, arXiv 2601.14243, section 4):

    FProp   Y  = X W^T       X in 1x128 groups along K        W in 128x128 blocks
    DGrad   dX = dY W        dY in 1x128 groups along N       W^T: the same codes and scales, transposed
    WGrad   dW = dY^T X      dY^T in groups along tokens      X^T re-laid out from the codes saved by FProp

FProp is the two steps of the operator that vLLM calls (``kernels.fprop``), quantise and multiply, which is what makes
the sampled policy the trained one. What is saved for backward is X as codes and scales, 1.03 bytes an element instead
of 2, and the weight by reference, as ``F.linear`` does; the weight's codes are not saved, or a whole model's worth
would stay alive through a step.

**When X is quantised.** Once, although the model calls q, k and v (and gate and up) as layers of their own on one
tensor: ``_InputMemo`` knows the codes of the last input, recognises that very tensor object, unchanged, in the next
call, and forgets them when the object dies. The layers then save one copy of the codes between them, and share the
re-layout of X in backward the same way. Whoever makes X may have made its codes on the way (a norm that quantises what
it writes) and says so with :func:`remember_codes`.

**When weight codes are made.** Quantising a weight more often than it changes would be waste, keeping codes longer than
the weight itself would be a leak. FSDP decides how long a gathered weight lives, so the codes live exactly as long:
FSDP2 puts a gathered or sharded tensor in place by setting the module's ``weight`` attribute, and that assignment drops
the cache (``JetLinear.__setattr__``). FSDP1 sets it at each gather only, so its codes live until the next gather or the
end of the pass, where the engine drops them (train/engine.py). Between two assignments FProp, a recomputed FProp and
DGrad share one quantisation. An in-place change (an optimiser step on an unsharded module) shows in the version
counter. A write that passes it by, through ``weight.data`` or by address, does not show: whoever writes so calls
:meth:`JetLinear.drop_codes`.

**Where dW goes.** To ``weight.grad`` through autograd, in BF16. A caller that keeps FP32 gradients over several
micro-batches hangs the buffer ``[N, K]`` on the parameter as ``weight.main_grad`` (Megatron's and Transformer Engine's
name for it): WGrad then adds its FP32 product there, one rounding an element instead of a BF16 tensor written, read and
converted, and ``weight.grad`` stays None. It must hang on the tensor that the forward sees, so it is for loops that own
their parameters, not for FSDP, which puts another tensor in place at every gather.

``backward="bf16"`` is QaRL's choice (arXiv 2604.07853): FProp as above, straight-through BF16 gradients from a saved
BF16 X and the BF16 weight.
"""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.layers import LinearPlan, UnsupportedLayer, plan_of
from jetrl_verl.numerics import BlockQuantized, ScaleRule, check_rule


class _WeightCodes(NamedTuple):
    """Codes of one gathered weight, valid while the storage in place is this one at this version."""

    address: int
    version: int
    codes: BlockQuantized


class _SharedColumns:
    """X re-laid out for WGrad: made by the first layer that needs it, dropped with the last one that was promised it.

    Attributes:
        readers: backward nodes that still have to read it.
    """

    def __init__(self) -> None:
        self.readers = 0
        self._columns: BlockQuantized | None = None

    def take(self, rows: BlockQuantized, rule: ScaleRule) -> BlockQuantized:
        """128x1 codes [K, M] from the saved 1x128 codes [M, K], for one reader."""
        columns = self._columns if self._columns is not None else kernels.relayout_128x1(rows, rule)
        self.readers -= 1
        # A graph that is kept for a second backward has no promised readers left; each of its nodes makes its own.
        self._columns = columns if self.readers > 0 else None
        return columns


class QuantisedInput(NamedTuple):
    """1x128 codes of X [M, K] and what the layers that read X share in backward."""

    rows: BlockQuantized
    columns: _SharedColumns


class _InputMemo:
    """The codes of the last input, valid while that tensor object lives unchanged; it does not keep the object alive.

    By object, not address: the next activation may be allocated where this one was. One entry, because what the flow
    shares is read by consecutive layers and a second entry would only keep codes longer.
    """

    def __init__(self) -> None:
        self._entry: tuple | None = None

    def get(self, x: torch.Tensor, rule: ScaleRule) -> QuantisedInput:
        """Codes of the BF16 value of ``x`` [..., K] under ``rule``, made unless ``x`` was the last input."""
        entry = self._entry
        if entry is not None and entry[0]() is x and entry[1] == self._state(x, rule):
            return entry[2]
        self._entry = entry = None  # before the new codes are allocated
        with torch.no_grad():
            rows = kernels.quantize_1x128(x.detach().to(torch.bfloat16).reshape(-1, x.shape[-1]), rule)
        return self.put(x, rows, rule)

    def put(self, x: torch.Tensor, rows: BlockQuantized, rule: ScaleRule) -> QuantisedInput:
        """Remember that ``rows`` are the codes of ``x``."""
        quantised = QuantisedInput(rows, _SharedColumns())
        # A tensor of inference mode has no version counter, so nothing would show that it changed.
        if not x.is_inference():
            self._entry = (weakref.ref(x, self._forget), self._state(x, rule), quantised)
        return quantised

    def drop(self) -> None:
        """Forget the codes."""
        self._entry = None

    def _forget(self, reference: weakref.ref) -> None:
        entry = self._entry
        if entry is not None and entry[0] is reference:
            self._entry = None

    @staticmethod
    def _state(x: torch.Tensor, rule: ScaleRule) -> tuple:
        return x._version, x.data_ptr(), rule


_input_codes = _InputMemo()


def quantised_input(x: torch.Tensor, rule: ScaleRule) -> QuantisedInput:
    """1x128 codes of the BF16 value of ``x`` [..., K], and what its readers share in backward; made unless ``x`` is the
    tensor that a layer read last, or that :func:`remember_codes` was told of."""
    return _input_codes.get(x, rule)


def remember_codes(x: torch.Tensor, codes: BlockQuantized, rule: ScaleRule) -> None:
    """Tell the layers that read ``x`` next what its codes are, so that they do not quantise it.

    Args:
        x: ``[..., K]``, the object that will be passed to the layers.
        codes: ``kernels.quantize_1x128`` of the BF16 value of ``x`` as ``[M, K]``: codes ``[M, K]``, scales
            ``[M, ceil(K/128)]``. Not checked.
        rule: scale rule of the codes.
    """
    _input_codes.put(x, codes, rule)


class _FP8LinearFunction(torch.autograd.Function):
    """FProp, DGrad and WGrad of one layer; see the module's docstring for the formulas."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: "JetLinear",
        quantised: QuantisedInput,
    ):
        # The argument `bias` gives autograd its edge; what is added is its BF16 value, as the rollout holds it.
        ctx.layer = layer
        ctx.x_shape = x.shape
        # Looked up here: activation checkpointing hands backward an alias of the weight that has no attributes.
        ctx.main_grad = getattr(weight, "main_grad", None)
        rows, columns = quantised
        if layer.backward_precision == "bf16":
            ctx.save_for_backward(x.reshape(-1, layer.in_features), weight)
        else:
            ctx.save_for_backward(rows.codes, rows.scales, weight)
            ctx.columns = columns
            columns.readers += ctx.needs_input_grad[1]
        return layer.fprop(rows, weight).reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        layer: JetLinear = ctx.layer
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        dy = dy.reshape(-1, layer.out_features).to(torch.bfloat16).contiguous()
        dx = dw = dbias = None
        if needs_bias:
            # From the unquantised gradient, summed in FP32 (contract, "Bias").
            dbias = dy.sum(dim=0, dtype=torch.float32)
        if layer.backward_precision == "bf16":
            x, weight = ctx.saved_tensors
            if needs_x:
                dx = dy @ weight.to(torch.bfloat16)
            if needs_w:
                dw = dy.t() @ x
                if ctx.main_grad is None:
                    dw = dw.to(weight.dtype)
                else:
                    ctx.main_grad += dw
                    dw = None
        else:
            x_codes, x_scales, weight = ctx.saved_tensors
            if needs_x and needs_w:
                dy_rows, dy_columns = kernels.quantize_1x128_and_128x1(dy, layer.scale_rule)
            elif needs_x:
                dy_rows = kernels.quantize_1x128(dy, layer.scale_rule)
            elif needs_w:
                dy_columns = kernels.quantize_128x1(dy, layer.scale_rule)
            if needs_x:
                dx = layer.dgrad(dy_rows, weight)
            if needs_w:
                x_columns = ctx.columns.take(BlockQuantized(x_codes, x_scales), layer.scale_rule)
                dw = layer.wgrad(dy_columns, x_columns, weight, ctx.main_grad)
        return (
            dx.reshape(ctx.x_shape) if dx is not None else None,
            dw,
            dbias.to(layer.bias.dtype) if dbias is not None else None,
            None,
            None,
        )


class JetLinear(nn.Linear):
    """``nn.Linear`` in the FP8 flow; parameters, their names and their dtypes are those of the layer it replaces.

    Input ``[..., K]`` of any floating type, output ``[..., N]`` BF16. The input is cast to BF16 first and the weight's
    BF16 value is what is quantised, so the layer behaves the same under autocast, FSDP mixed precision, or neither.

    Attributes:
        scale_rule: ``"fp32"`` or ``"pow2"``.
        backward_precision: ``"fp8"`` or ``"bf16"`` for DGrad and WGrad.
        quantisations: how often the weight has been quantised since construction.
    """

    scale_rule: ScaleRule
    backward_precision: str
    quantisations: int

    @classmethod
    def replace(cls, linear: nn.Linear, *, scale_rule: ScaleRule, backward: str) -> "JetLinear":
        """Turn ``linear`` into this class in place: same module object, same parameter objects.

        Raises:
            ValueError: an unknown scale rule or backward precision.
        """
        check_rule(scale_rule)
        if backward not in ("fp8", "bf16"):
            raise ValueError(f"unknown backward precision {backward!r}; choose fp8 or bf16")
        linear.__class__ = cls
        linear.scale_rule = scale_rule
        linear.backward_precision = backward
        linear.quantisations = 0
        linear._codes = None
        return linear

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self._drop_weight_codes()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            self._drop_weight_codes()
        super().__delattr__(name)

    def rounded_bias(self) -> torch.Tensor | None:
        """BF16 value of the bias, which is what the rollout holds of an FP32 master."""
        return None if self.bias is None else self.bias.detach().to(torch.bfloat16)

    def _drop_weight_codes(self) -> None:
        object.__setattr__(self, "_codes", None)

    def drop_codes(self) -> None:
        """Forget the weight's codes and those of the last input of any layer; the next use makes them again."""
        self._drop_weight_codes()
        _input_codes.drop()

    def weight_codes(self, weight: torch.Tensor) -> BlockQuantized:
        """128x128 codes of ``weight`` [N, K], made at most once while the tensor stays in place unchanged."""
        cached = self._codes
        counted = not weight.is_inference()  # else nothing would show that it changed
        # By address, not identity: activation checkpointing hands backward a detached alias of the same weight.
        if counted and cached is not None and (cached.address, cached.version) == (weight.data_ptr(), weight._version):
            return cached.codes
        with torch.no_grad():
            codes = kernels.quantize_128x128(weight.detach().to(torch.bfloat16), self.scale_rule)
        object.__setattr__(self, "quantisations", self.quantisations + 1)
        if counted:
            object.__setattr__(self, "_codes", _WeightCodes(weight.data_ptr(), weight._version, codes))
        return codes

    def fprop(self, x: BlockQuantized, weight: torch.Tensor) -> torch.Tensor:
        """``Y`` [M, N] BF16 of the codes of X [M, K] and ``weight`` [N, K]: ``kernels.fprop`` after its first step."""
        return kernels.gemm_nt(x, self.weight_codes(weight), b_block_scaled=True, bias=self.rounded_bias())

    def dgrad(self, dy: BlockQuantized, weight: torch.Tensor) -> torch.Tensor:
        """``dX`` [M, K] BF16 of the 1x128 codes of dY [M, N] and ``weight`` [N, K]."""
        return kernels.gemm_nt(dy, kernels.transpose_128x128(self.weight_codes(weight)), b_block_scaled=True)

    def wgrad(
        self, dy: BlockQuantized, x: BlockQuantized, weight: torch.Tensor, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """``dW`` [N, K] of the 128x1 codes of dY [N, M] and of X [K, M]: added to ``main_grad`` in FP32, or returned.

        FSDP gathers BF16 weights and takes BF16 gradients; an FP32 weight gets the same BF16 product.
        """
        if main_grad is None:
            return kernels.gemm_nt(dy, x, b_block_scaled=False).to(weight.dtype)
        kernels.gemm_nt(dy, x, b_block_scaled=False, out_dtype=torch.float32, add_to=main_grad)
        return None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        quantised = quantised_input(input, self.scale_rule)
        if not torch.is_grad_enabled():
            return self.fprop(quantised.rows, self.weight).reshape(*input.shape[:-1], self.out_features)
        return _FP8LinearFunction.apply(input.to(torch.bfloat16), self.weight, self.bias, self, quantised)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8=1x128/128x128, scale={self.scale_rule}, backward={self.backward_precision}"


def replace_linears(
    model: nn.Module, plans: Mapping[str, LinearPlan], *, scale_rule: ScaleRule, backward: str = "fp8"
) -> list[str]:
    """Put ``JetLinear`` where the plan says so.

    Args:
        model: a dense decoder built from the configuration that ``plans`` was made from, before FSDP wraps it.
        plans: from :func:`jetrl_verl.layers.plan_linears`.
        scale_rule: ``"fp32"`` or ``"pow2"``. backward: ``"fp8"`` or ``"bf16"`` for DGrad and WGrad.

    Returns:
        Names of the replaced modules.

    Raises:
        UnsupportedLayer: a decoder layer holds a linear that the plan does not know, or one of another shape.
        ValueError: unknown scale rule or backward precision.
    """
    replaced = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or ".layers." not in f".{name}":
            continue
        plan = plan_of(name, plans)
        if plan is None:
            raise UnsupportedLayer(f"layer {name} is a linear layer unknown to the FP8 flow; use precision=bf16")
        if (plan.n, plan.k) != (module.out_features, module.in_features):
            raise UnsupportedLayer(
                f"layer {name} has shape [{module.out_features}, {module.in_features}] but the model's configuration "
                f"says [{plan.n}, {plan.k}]; the configuration and the weights do not belong together"
            )
        if plan.quantised:
            JetLinear.replace(module, scale_rule=scale_rule, backward=backward)
            replaced.append(name)
    return replaced

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

FProp is the operator that vLLM calls (``kernels.fprop``), which is what makes the sampled policy the trained one. What
is saved for backward is X as codes and scales, 1.03 bytes an element instead of 2, and the weight by reference, as
``F.linear`` does; the weight's codes are not saved, or a whole model's worth would stay alive through a step.

**When weight codes are made.** Quantising a weight more often than it changes would be waste, keeping codes longer than
the weight itself would be a leak. FSDP decides how long a gathered weight lives, so the codes live exactly as long:
FSDP2 puts a gathered or sharded tensor in place by setting the module's ``weight`` attribute, and that assignment drops
the cache (``JetLinear.__setattr__``). FSDP1 sets it at each gather only, so its codes live until the next gather or the
end of the pass, where the engine drops them (train/engine.py). Between two assignments FProp, a recomputed FProp and
DGrad share one quantisation. An in-place change (an optimiser step on an unsharded module) shows in the version
counter.

``backward="bf16"`` is QaRL's choice (arXiv 2604.07853): FProp as above, straight-through BF16 gradients from a saved
BF16 X and the BF16 weight.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from jetrl_verl import kernels
from jetrl_verl.layers import LinearPlan, UnsupportedLayer, plan_of
from jetrl_verl.numerics import BlockQuantized, ScaleRule, check_rule


class _WeightCodes(NamedTuple):
    """Codes of one gathered weight, valid while the storage in place is this one at this version."""

    address: int
    version: int
    codes: BlockQuantized


class _FP8LinearFunction(torch.autograd.Function):
    """FProp, DGrad and WGrad of one layer; see the module's docstring for the formulas."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: "JetLinear"):
        w = layer.weight_codes(weight)
        # The argument gives autograd its edge; what is added is its BF16 value, as the rollout holds it.
        bias = layer.rounded_bias()
        ctx.layer = layer
        ctx.x_shape = x.shape
        x = x.reshape(-1, layer.in_features)
        if layer.backward_precision == "bf16":
            ctx.save_for_backward(x, weight)
            y = kernels.fprop(x, w.codes, w.scales, bias, layer.scale_rule)
        else:
            # The two steps of kernels.fprop, taken here because the codes of X are kept.
            xq = kernels.quantize_1x128(x, layer.scale_rule)
            ctx.save_for_backward(xq.codes, xq.scales, weight)
            y = kernels.gemm_nt(xq, w, b_block_scaled=True, bias=bias)
        return y.reshape(*ctx.x_shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        layer: JetLinear = ctx.layer
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
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
        else:
            x_codes, x_scales, weight = ctx.saved_tensors
            if needs_x and needs_w:
                dy_rows, dy_columns = kernels.quantize_1x128_and_128x1(dy, layer.scale_rule)
            elif needs_x:
                dy_rows = kernels.quantize_1x128(dy, layer.scale_rule)
            elif needs_w:
                dy_columns = kernels.quantize_128x1(dy, layer.scale_rule)
            if needs_x:
                w_transposed = kernels.transpose_128x128(layer.weight_codes(weight))
                dx = kernels.gemm_nt(dy_rows, w_transposed, b_block_scaled=True)
            if needs_w:
                x_columns = kernels.relayout_128x1(BlockQuantized(x_codes, x_scales), layer.scale_rule)
                dw = kernels.gemm_nt(dy_columns, x_columns, b_block_scaled=False)
        return (
            dx.reshape(ctx.x_shape) if dx is not None else None,
            # FSDP gathers BF16 weights and takes BF16 gradients; an FP32 weight gets the same BF16 product.
            dw.to(weight.dtype) if dw is not None else None,
            dbias.to(layer.bias.dtype) if dbias is not None else None,
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
            self.drop_codes()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            self.drop_codes()
        super().__delattr__(name)

    def rounded_bias(self) -> torch.Tensor | None:
        """BF16 value of the bias, which is what the rollout holds of an FP32 master."""
        return None if self.bias is None else self.bias.detach().to(torch.bfloat16)

    def drop_codes(self) -> None:
        """Forget the weight's codes; the next use makes them again."""
        object.__setattr__(self, "_codes", None)

    def weight_codes(self, weight: torch.Tensor) -> BlockQuantized:
        """128x128 codes of ``weight`` [N, K], made at most once while the tensor stays in place unchanged."""
        cached = self._codes
        # By address, not identity: activation checkpointing hands backward a detached alias of the same weight.
        if cached is not None and (cached.address, cached.version) == (weight.data_ptr(), weight._version):
            return cached.codes
        with torch.no_grad():
            codes = kernels.quantize_128x128(weight.detach().to(torch.bfloat16), self.scale_rule)
        object.__setattr__(self, "quantisations", self.quantisations + 1)
        object.__setattr__(self, "_codes", _WeightCodes(weight.data_ptr(), weight._version, codes))
        return codes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input.to(torch.bfloat16)
        if not torch.is_grad_enabled():
            w = self.weight_codes(self.weight)
            return kernels.fprop(x, w.codes, w.scales, self.rounded_bias(), self.scale_rule)
        return _FP8LinearFunction.apply(x, self.weight, self.bias, self)

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

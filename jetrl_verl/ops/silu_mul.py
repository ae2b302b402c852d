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
"""``silu(gate) * up``, the activation of a gated MLP: FP32 inside, one rounding to BF16.

Stock Hugging Face modules round ``silu(gate)`` to BF16 in between. On the CPU ``silu`` of a BF16 value is looked up
among its 65,536 results, see ops/reproducible.py.

The linear behind it quantises what it writes, and the linears in front of it its gradients. :func:`silu_mul_quantize`
and :func:`silu_mul_backward_quantize` make those codes on the way, byte for byte what the quantisers of ``kernels``
make of the BF16 results, without reading them back.
"""

from functools import cache

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from jetrl_verl import kernels
from jetrl_verl.kernels import native
from jetrl_verl.numerics import BlockQuantized
from jetrl_verl.ops._codes import Quantised, fake_columns, fake_rows, require_groups
from jetrl_verl.ops._operator import operator, require_bf16, require_shape, triton_kernels


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """silu and its derivative in FP32, by the 16 bits of a BF16 value read as an unsigned number."""
    bits = torch.arange(2**16, dtype=torch.int32)
    gate = (bits << 16).view(torch.float32).double()
    sigmoid = torch.sigmoid(gate)
    silu = torch.where(gate == -torch.inf, 0.0, gate * sigmoid)
    derivative = torch.where(gate.isinf(), (gate > 0).double(), sigmoid * (1 + gate * (1 - sigmoid)))
    return silu.float(), derivative.float()


def _look_up(table: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    # numpy reads 16-bit indices as they are, three times as fast as torch, which widens them to 32 or 64 first.
    bits = gate.detach().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(table.numpy().take(bits))


def _fake(gate, up):
    return torch.empty_like(up, memory_format=torch.contiguous_format)


@operator("silu_mul(Tensor gate, Tensor up) -> Tensor", fake=_fake)
def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    require_shape("silu_mul", "up", up, gate.shape)
    if gate.is_cuda:
        return triton_kernels().silu_mul(gate, up)
    return _look_up(_tables()[0], gate).mul_(up.float()).to(torch.bfloat16)


def _gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate.is_cuda:
        return triton_kernels().silu_mul_backward(dy, gate, up)
    dy = dy.float()
    silu, derivative = (_look_up(table, gate) for table in _tables())
    return derivative.mul_(up.float()).mul_(dy).to(torch.bfloat16), silu.mul_(dy).to(torch.bfloat16)


def _absent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(0), x.new_empty(0)


def _fake_quantize(gate, up, rule, with_product, with_columns):
    product = _fake(gate, up) if with_product else up.new_empty(0)
    return product, *fake_rows(up), *(fake_columns(up) if with_columns else _absent(up))


@operator(
    "silu_mul_quantize(Tensor gate, Tensor up, str rule, bool with_product, bool with_columns)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_quantize,
)
def _silu_mul_quantize(
    gate: torch.Tensor, up: torch.Tensor, rule: str, with_product: bool, with_columns: bool
) -> tuple[torch.Tensor, ...]:
    """product, codes and scales of its rows, of its columns; what was not asked for is empty."""
    require_shape("silu_mul_quantize", "up", up, gate.shape)
    if gate.is_cuda:
        from jetrl_verl.ops.triton_kernels.silu_mul_quantize import silu_mul_quantize as kernel

        product, rows, columns = kernel(gate, up, rule, with_product, with_columns)
    else:
        product = _silu_mul(gate, up)
        flat = product.reshape(-1, product.shape[-1])
        rows = kernels.quantize_1x128(flat, rule)
        columns = kernels.quantize_128x1(flat, rule) if with_columns else None
    return product if with_product else up.new_empty(0), *rows, *(columns if with_columns else _absent(up))


def _fake_backward_quantize(dy, gate, up, rule):
    return *fake_rows(gate), *fake_columns(gate), *fake_rows(up), *fake_columns(up)


@operator(
    "silu_mul_backward_quantize(Tensor dy, Tensor gate, Tensor up, str rule)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward_quantize,
)
def _silu_mul_backward_quantize(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str
) -> tuple[torch.Tensor, ...]:
    """Codes and scales of the rows and of the columns of gate's gradient, then of up's."""
    require_shape("silu_mul_backward_quantize", "up", up, gate.shape)
    require_shape("silu_mul_backward_quantize", "dy", dy, gate.shape)
    if gate.is_cuda:
        rows = [x.reshape(-1, x.shape[-1]) for x in (dy, gate, up)]
        if native.serves_silu_mul_backward(*rows):
            kernel = native.silu_mul_backward_quantize
        else:
            from jetrl_verl.ops.triton_kernels.silu_mul_quantize import silu_mul_backward_quantize as kernel
        quantised = kernel(*rows, rule)
    else:
        flat = (gradient.reshape(-1, gradient.shape[-1]) for gradient in _gradients(dy, gate, up))
        quantised = [q for gradient in flat for q in kernels.quantize_1x128_and_128x1(gradient, rule)]
    return tuple(tensor for q in quantised for tensor in q)


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor, rule: str | None):
        ctx.save_for_backward(gate, up)
        if rule is None:
            return _silu_mul(gate, up)
        product, codes, scales, *_ = _silu_mul_quantize(gate, up, rule, True, False)
        ctx.mark_non_differentiable(codes, scales)
        ctx.set_materialize_grads(False)  # no zeros in the place of the codes' gradients
        return product, codes, scales

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor, *_):
        return *_gradients(dy, *ctx.saved_tensors), None


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; differentiable in both.

    Args:
        gate, up: ``[..., I]`` BF16, possibly halves of one tensor.

    Returns:
        ``[..., I]`` BF16.

    Raises:
        TypeError: an operand is not BF16.
    """
    require_bf16("silu_mul", gate=gate, up=up)
    if torch.is_grad_enabled():
        return _SiLUMul.apply(gate, up, None)
    return _silu_mul(gate, up)


def silu_mul_quantize_1x128(gate: torch.Tensor, up: torch.Tensor, rule: str) -> Quantised:
    """:func:`silu_mul` and ``kernels.quantize_1x128`` of its result; differentiable in both.

    Args:
        gate, up: ``[..., I]`` BF16, possibly halves of one tensor, I a multiple of 128.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        (product ``[..., I]`` BF16, its codes ``[M, I]`` E4M3 and scales ``[M, I/128]`` FP32, M the number of rows).

    Raises:
        TypeError: an operand is not BF16. ValueError: I is not a multiple of 128, an unknown rule.
    """
    require_bf16("silu_mul_quantize_1x128", gate=gate, up=up)
    require_groups("silu_mul_quantize_1x128", up)
    if torch.is_grad_enabled():
        product, codes, scales = _SiLUMul.apply(gate, up, rule)
    else:
        product, codes, scales, *_ = _silu_mul_quantize(gate, up, rule, True, False)
    return Quantised(product, BlockQuantized(codes, scales))


def silu_mul_quantize(
    gate: torch.Tensor, up: torch.Tensor, rule: str, *, with_product: bool, with_columns: bool
) -> tuple[torch.Tensor | None, BlockQuantized, BlockQuantized | None]:
    """Codes of ``silu(gate) * up`` rounded to BF16, without a gradient.

    Args:
        gate, up: ``[..., I]`` BF16, possibly halves of one tensor, I a multiple of 128.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.
        with_product: whether the product is wanted in BF16 too.
        with_columns: whether the token-grouped codes are wanted too.

    Returns:
        (product ``[..., I]`` BF16 or None, ``kernels.quantize_1x128`` of it as ``[M, I]``, ``kernels.quantize_128x1``
        of it or None).

    Raises:
        TypeError: an operand is not BF16. ValueError: I is not a multiple of 128, an unknown rule.
    """
    require_bf16("silu_mul_quantize", gate=gate, up=up)
    require_groups("silu_mul_quantize", up)
    product, codes, scales, *columns = _silu_mul_quantize(gate, up, rule, with_product, with_columns)
    return (
        product if with_product else None,
        BlockQuantized(codes, scales),
        BlockQuantized(*columns) if with_columns else None,
    )


def silu_mul_backward_quantize(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rule: str
) -> tuple[BlockQuantized, BlockQuantized, BlockQuantized, BlockQuantized]:
    """Codes of the BF16 gradients of :func:`silu_mul`, in both layouts that the backward of a linear reads.

    Args:
        dy: gradient of the product, ``[..., I]`` BF16. gate, up: its operands, I a multiple of 128.
        rule: scale rule, ``"fp32"`` or ``"pow2"``.

    Returns:
        ``kernels.quantize_1x128_and_128x1`` of gate's gradient as ``[M, I]``, then of up's.

    Raises:
        TypeError: an operand is not BF16. ValueError: I is not a multiple of 128, an unknown rule.
    """
    require_bf16("silu_mul_backward_quantize", dy=dy, gate=gate, up=up)
    require_groups("silu_mul_backward_quantize", up)
    tensors = _silu_mul_backward_quantize(dy, gate, up, rule)
    return tuple(BlockQuantized(*tensors[i : i + 2]) for i in range(0, 8, 2))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (reference/delta_net.py): l2 norms of queries and keys, gates, and the rule by chunks.

``gated_delta_rule`` computes whole sequences, ``gated_delta_rule_update`` continues those of a rollout's slots: the
same bits, wherever a sequence is cut, by csrc/delta_rule.cuh on a GPU. The gradient is computed by chunks of 64
tokens from the saved inputs (gated_delta_rule_gradient.py).
"""

import torch
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels import native
from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.dispatch import NATIVE_ALONE, implements, lookup
from jetrl_verl.kernels.gated_delta_rule_gradient import gated_delta_rule_backward
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16, require_fp32, require_shape
from jetrl_verl.kernels.recomputation import computed_once
from jetrl_verl.kernels.slots import read_slots, require_slots, write_slots, zero_padded
from jetrl_verl.kernels.views import as_type, unit_stride
from jetrl_verl.reference import delta_net
from jetrl_verl.reference.delta_net import HEAD, state_shape

__all__ = ["gated_delta_rule", "gated_delta_rule_update"]

# --- reference --------------------------------------------------------------------------------------------------------


@implements("gated_delta_rule", "reference")
def reference_gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens) -> torch.Tensor:
    """``[T, HV, 128]`` BF16."""
    nothing, computed = b.new_zeros(len(cu_seqlens) - 1, *state_shape(b.shape[1])), torch.zeros_like(cu_seqlens[1:])
    return delta_net.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens, nothing, computed)


@implements("gated_delta_rule_update", "reference")
def reference_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens, out) -> None:
    """As :func:`gated_delta_rule_update`."""
    read = read_slots(states, slots, computed)
    o = delta_net.gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens, read, computed)
    write_slots(states, slots, cu_seqlens, read)
    out.copy_(zero_padded(o, slots, cu_seqlens))


# --- native -----------------------------------------------------------------------------------------------------------


def _native_supports(*call) -> bool:
    """Whether the kernels of csrc/delta_rule.cuh compute this call."""
    if native.unavailable() is not None:
        return False
    if len(call) == 6:  # without states
        return True
    slot, head, *row = (states := call[5]).stride()
    return row == [HEAD, 1] and slot % 4 == head % 4 == 0 and states.data_ptr() % native.ALIGNMENT == 0


@implements("gated_delta_rule_update", "native", supports=_native_supports)
def native_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens, out) -> None:
    """As :func:`reference_gated_delta_rule_update`; without states every sequence starts here."""
    if not len(qkv):
        return
    native.operators().delta_rule(
        qkv.contiguous(),
        unit_stride(b),
        unit_stride(a),
        # In vLLM's types.
        a_log.float().contiguous(),
        dt_bias.to(torch.bfloat16).contiguous(),
        states,
        slots,
        computed,
        cu_seqlens,
        out,
    )


@implements("gated_delta_rule", "native", supports=_native_supports)
def native_gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens) -> torch.Tensor:
    """As :func:`reference_gated_delta_rule`, by the update's kernel."""
    out = qkv.new_empty(*b.shape, HEAD)
    native_gated_delta_rule_update(qkv, b, a, a_log, dt_bias, None, None, None, cu_seqlens, out)
    return out


# --- torch operators --------------------------------------------------------------------------------------------------


def _fake(qkv, b, *_):
    return qkv.new_empty(*b.shape, HEAD)


_gated_delta_rule = dispatched(
    "gated_delta_rule(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, Tensor cu_seqlens) -> Tensor",
    fake=_fake,
    backends=NATIVE_ALONE,
)


@operator(
    "gated_delta_rule_update(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, Tensor(a!) states,"
    " Tensor slots, Tensor computed, Tensor cu_seqlens, Tensor(b!) out) -> ()",
    fake=lambda *_: None,
    backends=NATIVE_ALONE,
)
def gated_delta_rule_update(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """:func:`gated_delta_rule` of the next tokens of requests, for inference.

    Args:
        qkv: ``[T, C]`` BF16 of ``causal_conv1d_update``. b, a, a_log, dt_bias: as of :func:`gated_delta_rule`.
        states: ``[slots, HV, 193, 128]`` FP32, ``State`` of the reference, each head's contiguous, written in place.
        slots, computed, cu_seqlens: as of ``causal_conv1d_update``.
        out: ``[T, HV, 128]`` BF16, contiguous, written in place.

    Raises:
        TypeError: an operand of another type. ValueError: shapes that do not fit.
    """
    _check("gated_delta_rule_update", qkv, b, a, a_log, dt_bias)
    require_fp32("gated_delta_rule_update", states=states)
    require_shape("gated_delta_rule_update", "states", states, (len(states), *state_shape(b.shape[1])))
    require_slots("gated_delta_rule_update", slots, computed, cu_seqlens)
    require_bf16("gated_delta_rule_update", out=out)
    require_shape("gated_delta_rule_update", "out", out, (*b.shape, HEAD))
    run = lookup("gated_delta_rule_update", qkv.device)
    run(qkv, b, a, a_log, dt_bias, states, slots, computed, cu_seqlens, out)


def _check(operation: str, qkv, b, a, a_log, dt_bias) -> None:
    require_bf16(operation, qkv=qkv)
    require_fp32(operation, b=b, a=a)
    require_shape(operation, "b", b, (len(qkv), b.shape[-1]))
    for name, tensor, shape in (("a", a, b.shape), ("a_log", a_log, b.shape[1:]), ("dt_bias", dt_bias, b.shape[1:])):
        require_shape(operation, name, tensor, shape)
    keys, rest = divmod(qkv.shape[1] - HEAD * b.shape[1], 2 * HEAD)
    if rest or keys < 1 or b.shape[1] % keys:
        raise ValueError(
            f"{operation}: {qkv.shape[1]} columns are not query, key and {b.shape[1]} value heads of {HEAD}, with as "
            "many value heads for each key head; pass the convolution's q | k | v"
        )


# --- functions --------------------------------------------------------------------------------------------------------


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, b, a, a_log, dt_bias, cu_seqlens):
        ctx.save_for_backward(qkv, b, a)
        keep(ctx, a_log, dt_bias, cu_seqlens)
        return computed_once(_gated_delta_rule, qkv, b, a, a_log, dt_bias, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: torch.Tensor):
        (qkv, b, a), (a_log, dt_bias, cu_seqlens) = ctx.saved_tensors, kept(ctx)
        rounded = (x.to(torch.bfloat16) for x in (a_log, dt_bias))
        with torch.autocast(qkv.device.type, enabled=False):  # products stay FP32
            dqkv, db, da, da_log, ddt_bias = gated_delta_rule_backward(do, qkv, b, a, *rounded, cu_seqlens)
        return dqkv, db, da, as_type(da_log, a_log.dtype), as_type(ddt_bias, dt_bias.dtype), None


def gated_delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """The rule over packed sequences, which begin with a state of zeros; differentiable in all but the last.

    Args:
        qkv: ``[T, C]`` BF16 of ``causal_conv1d``: q and k of HK heads, v of HV heads, all of 128 features.
        b, a: ``[T, HV]`` FP32. a_log, dt_bias: ``[HV]``, taken at their BF16 values.
        cu_seqlens: ``[B + 1]`` int32, first tokens of the sequences and T.

    Returns:
        ``[T, HV, 128]`` BF16.

    Raises:
        TypeError: an operand of another type. ValueError: shapes that do not fit.
    """
    _check("gated_delta_rule", qkv, b, a, a_log, dt_bias)
    if torch.is_grad_enabled():
        return _GatedDeltaRule.apply(qkv, b, a, a_log, dt_bias, cu_seqlens)
    return _gated_delta_rule(qkv, b, a, a_log, dt_bias, cu_seqlens)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution of width 4 with SiLU of a gated delta net (reference/delta_net.py).

``causal_conv1d`` computes whole sequences, ``causal_conv1d_update`` continues those of a rollout's slots: the same
bits, wherever a sequence is cut.
"""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from jetrl_verl.kernels.by_reference import keep, kept
from jetrl_verl.kernels.device.dependents import launch_dependents
from jetrl_verl.kernels.device.elementary import numbers_of, sigmoid
from jetrl_verl.kernels.device.launch import jit
from jetrl_verl.kernels.dispatch import implements, lookup
from jetrl_verl.kernels.operator import dispatched, operator, require_bf16, require_shape
from jetrl_verl.kernels.sizes import ceil_div
from jetrl_verl.kernels.slots import read_slots, require_slots, write_slots, zero_padded
from jetrl_verl.kernels.views import as_type, unit_stride
from jetrl_verl.reference import delta_net
from jetrl_verl.reference.delta_net import TAPS

__all__ = ["causal_conv1d", "causal_conv1d_update"]

# --- reference --------------------------------------------------------------------------------------------------------


@implements("causal_conv1d", "reference")
def reference_causal_conv1d(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``[T, C]`` BF16."""
    return delta_net.causal_conv1d(x, weight, cu_seqlens, _nothing_before(x, cu_seqlens))[0]


@implements("causal_conv1d_update", "reference")
def reference_causal_conv1d_update(x, weight, states, slots, computed, cu_seqlens) -> torch.Tensor:
    """``[T, C]`` BF16; ``states`` are written in place."""
    past = read_slots(states, slots, computed)
    y, past = delta_net.causal_conv1d(x, weight, cu_seqlens, past)
    write_slots(states, slots, cu_seqlens, past)
    return zero_padded(y, slots, cu_seqlens)


@implements("causal_conv1d_backward", "reference")
def reference_causal_conv1d_backward(dy, x, weight, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """dx ``[T, C]`` BF16 and dw ``[C, 4]`` FP32; the convolution is computed again."""
    y = delta_net.convolve(x, weight, cu_seqlens, _nothing_before(x, cu_seqlens))
    probability = y.sigmoid()
    # silu'(y) = p (1 + y (1 - p))
    dconv = dy.float() * probability * (1 + y * (1 - probability))
    place = delta_net.places(cu_seqlens, len(x))[1][:, None]
    taps = weight.to(torch.bfloat16).float().unbind(1)
    dx, dw = dconv * taps[-1], [(dconv * x).sum(0)]
    for distance in range(1, TAPS):
        # Of a token with another one ``distance`` before it in its sequence.
        reaching = torch.where(place >= distance, dconv, 0)
        dw.append((reaching * x.roll(distance, 0)).sum(0))
        dx += reaching.roll(-distance, 0) * taps[-1 - distance]
    return dx.to(x.dtype), torch.stack(dw[::-1], dim=1)


def _nothing_before(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(cu_seqlens) - 1, TAPS - 1, x.shape[1])


# --- Triton -----------------------------------------------------------------------------------------------------------

_TILE, _FEW_TILE, _WALK, _WARPS = (16, 256), (4, 1024), (1, 1024), 4
"""Tokens and channels of a program of the convolution, where sequences have few tokens each, and where they have one:
then a program walks along its sequence."""
_FEW_TOKENS = 4
_BACKWARD_TOKENS, _BACKWARD_CHANNELS = 64, 128
"""Tokens and channels of a program of the gradient, one warp."""


@jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    # Products of BF16 numbers are exact in FP32, so a fused addition has the bits of a separate one.
    return x3 * w3 + (x2 * w2 + (x1 * w1 + x0 * w0))


@jit
def _silu(y):
    return (y * sigmoid(y)).to(tl.bfloat16)


@jit
def _sequences_of(token, cu_ptr, sequences):
    """The sequence of each ``token``; ``sequences`` after the last one."""
    started = tl.zeros(token.shape, tl.int32)
    for start in range(0, sequences + 1, 128):
        place = start + tl.arange(0, 128)
        first = tl.load(cu_ptr + place, mask=place <= sequences, other=2147483647)
        started += tl.sum((first[None, :] <= token[:, None]).to(tl.int32), axis=1)
    return started - 1


@jit
def _first_tokens(
    x_ptr, channel, inside, w0, w1, w2, w3, states_ptr, slots_ptr, computed_ptr, cu_ptr, y_ptr,
    sequence, tokens, sequences, channels, stride, stride_slot, stride_place, stride_channel, paged, WALK: tl.constexpr,
):  # fmt: skip
    """The first three tokens of a sequence, which read its state, or with WALK all, and then its new state. What is
    after the last sequence counts as a padded one."""
    real = sequence < sequences
    first = tl.load(cu_ptr + sequence)
    last = tl.load(cu_ptr + sequence + 1, mask=real, other=tokens)
    slot = tl.load(slots_ptr + sequence, mask=real & (paged != 0), other=tl.where(real, 0, -1)).to(tl.int64)
    computed = tl.load(computed_ptr + sequence, mask=real & (paged != 0), other=0)
    x_ptr += first.to(tl.int64) * stride
    y_ptr += first.to(tl.int64) * channels
    states_ptr += slot * stride_slot
    place = channel * stride_channel
    # Before the state is waited for.
    x3 = tl.load(x_ptr + channel, mask=inside & (first < last), other=0.0)
    read = inside & (slot >= 0) & (computed > 0)
    x0 = tl.load(states_ptr + place, mask=read, other=0.0).to(tl.float32)
    x1 = tl.load(states_ptr + stride_place + place, mask=read, other=0.0).to(tl.float32)
    x2 = tl.load(states_ptr + 2 * stride_place + place, mask=read, other=0.0).to(tl.float32)
    x3 = x3.to(tl.float32)
    count = last - first if WALK else tl.minimum(last - first, 3)
    for token in range(1, count + 1):
        y = _silu(_convolved(x0, x1, x2, x3, w0, w1, w2, w3))
        tl.store(y_ptr + channel, tl.where(slot >= 0, y, 0.0), mask=inside)
        x_ptr += stride
        y_ptr += channels
        x0, x1, x2 = x1, x2, x3
        x3 = tl.load(x_ptr + channel, mask=inside & (token < count), other=0.0).to(tl.float32)
    if not WALK:
        others = last - first - 3
        if others > 0:
            x_ptr += (others - 3).to(tl.int64) * stride
            x0 = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + stride + channel, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + 2 * stride + channel, mask=inside, other=0.0).to(tl.float32)
    written = inside & (paged != 0) & (slot >= 0) & (first < last)
    tl.store(states_ptr + place, x0.to(tl.bfloat16), mask=written)
    tl.store(states_ptr + stride_place + place, x1.to(tl.bfloat16), mask=written)
    tl.store(states_ptr + 2 * stride_place + place, x2.to(tl.bfloat16), mask=written)


@jit
def _later_tokens(
    x_ptr, channel, inside, w0, w1, w2, w3, slots_ptr, cu_ptr, y_ptr, token, tokens, sequences, channels, stride, paged
):
    """A tile of the tokens that have three others before them; zeros after the last sequence."""
    x_ptr += token.to(tl.int64)[:, None] * stride + channel[None, :]
    # Before the sequences are known; of another sequence's rows nothing is stored.
    read = ((token >= 3) & (token < tokens))[:, None] & inside[None, :]
    x0 = tl.load(x_ptr - 3 * stride, mask=read, other=0.0)
    x1 = tl.load(x_ptr - 2 * stride, mask=read, other=0.0)
    x2 = tl.load(x_ptr - stride, mask=read, other=0.0)
    x3 = tl.load(x_ptr, mask=read, other=0.0)
    sequence = _sequences_of(token, cu_ptr, sequences)
    known = (token < tokens) & (sequence < sequences)
    slot = tl.load(slots_ptr + sequence, mask=known & (paged != 0), other=0)
    later = token - tl.load(cu_ptr + sequence, mask=known, other=0) >= 3
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    y = _silu(_convolved(x0, x1, x2, x3, w0[None, :], w1[None, :], w2[None, :], w3[None, :]))
    y = tl.where((known & (slot >= 0))[:, None], y, 0.0)
    written = ((token < tokens) & (later | (sequence == sequences)))[:, None] & inside[None, :]
    tl.store(y_ptr + token.to(tl.int64)[:, None] * channels + channel[None, :], y, mask=written)


@jit(do_not_specialize=["tokens", "sequences", "paged"])
def _conv_kernel(
    x_ptr, weight_ptr, states_ptr, slots_ptr, computed_ptr, cu_ptr, y_ptr,
    tokens, sequences, channels, stride, stride_slot, stride_place, stride_channel, paged,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """TOKENS: of a program after those of the sequences; with 1 these walk along them."""
    launch_dependents()  # the delta rule
    program, channel = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    w0, w1, w2, w3 = numbers_of(tl.load(weight_ptr + channel, mask=inside, other=0))
    if (program < sequences) | (TOKENS == 1):
        _first_tokens(
            x_ptr, channel, inside, w0, w1, w2, w3, states_ptr, slots_ptr, computed_ptr, cu_ptr, y_ptr, program,
            tokens, sequences, channels, stride, stride_slot, stride_place, stride_channel, paged, TOKENS == 1,
        )  # fmt: skip
    else:
        token = (program - sequences) * TOKENS + tl.arange(0, TOKENS)
        _later_tokens(
            x_ptr, channel, inside, w0, w1, w2, w3, slots_ptr, cu_ptr, y_ptr,
            token, tokens, sequences, channels, stride, paged,
        )  # fmt: skip


@jit
def _four_rows(x_ptr, inside, count, stride):
    """Four rows from ``x_ptr`` on, zeros after ``count``."""
    x0 = tl.load(x_ptr, mask=inside & (count > 0), other=0.0)
    x1 = tl.load(x_ptr + stride, mask=inside & (count > 1), other=0.0)
    x2 = tl.load(x_ptr + 2 * stride, mask=inside & (count > 2), other=0.0)
    x3 = tl.load(x_ptr + 3 * stride, mask=inside & (count > 3), other=0.0)
    return x0, x1, x2, x3


@jit(do_not_specialize=["tokens", "sequences"])
def _conv_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cu_ptr, dx_ptr, dw_ptr, tokens, sequences, channels, stride,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    w0, w1, w2, w3 = numbers_of(tl.load(weight_ptr + channel, mask=inside, other=0))
    start = tl.program_id(0) * TOKENS
    stop = tl.minimum(start + TOKENS, tokens) + 3
    read_stop = tl.minimum(stop, tl.load(cu_ptr + sequences))
    x_ptr += start.to(tl.int64) * stride + channel
    dy_ptr += start.to(tl.int64) * channels + channel
    dx_ptr += (start.to(tl.int64) - 3) * channels + channel
    xs = _four_rows(x_ptr, inside, read_stop - start, stride)
    dys = _four_rows(dy_ptr, inside, read_stop - start, channels)
    sequence = tl.sum(_sequences_of(start + tl.arange(0, 1), cu_ptr, sequences), axis=0)
    first = tl.load(cu_ptr + sequence)
    following = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=2147483647)
    x0 = tl.load(x_ptr - 3 * stride, mask=inside & (start - 3 >= first), other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr - 2 * stride, mask=inside & (start - 2 >= first), other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr - stride, mask=inside & (start - 1 >= first), other=0.0).to(tl.float32)
    zero = tl.zeros((CHANNELS,), tl.float32)
    dx0, dx1, dx2 = zero, zero, zero  # of the three tokens before, from those up to here
    dw0, dw1, dw2, dw3 = zero, zero, zero, zero
    for four in range(start, stop, 4):
        # The next four rows are on their way while these are computed.
        x_ptr += 4 * stride
        dy_ptr += 4 * channels
        next_xs = _four_rows(x_ptr, inside, read_stop - four - 4, stride)
        next_dys = _four_rows(dy_ptr, inside, read_stop - four - 4, channels)
        for i in tl.static_range(4):
            t = four + i
            while (following <= t) & (sequence < sequences):
                sequence += 1
                first = following
                following = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=2147483647)
                x0, x1, x2 = zero, zero, zero
            place, x3, dy = t - first, xs[i].to(tl.float32), dys[i].to(tl.float32)
            y = _convolved(x0, x1, x2, x3, w0, w1, w2, w3)
            probability = sigmoid(y)
            dy *= probability * (1.0 + y * (1.0 - probability))
            dx = dx0 + tl.where(place >= 3, w0 * dy, 0.0)
            tl.store(dx_ptr, dx.to(tl.bfloat16), mask=inside & (t - 3 >= start) & (t < stop))
            dx0 = dx1 + tl.where(place >= 2, w1 * dy, 0.0)
            dx1 = dx2 + tl.where(place >= 1, w2 * dy, 0.0)
            dx2 = w3 * dy
            mine = tl.where(t < start + TOKENS, dy, 0.0)
            dw0, dw1, dw2, dw3 = dw0 + x0 * mine, dw1 + x1 * mine, dw2 + x2 * mine, dw3 + x3 * mine
            x0, x1, x2 = x1, x2, x3
            dx_ptr += channels
        xs, dys = next_xs, next_dys
    dw_ptr += tl.program_id(0).to(tl.int64) * 4 * channels + channel
    tl.store(dw_ptr, dw0, mask=inside)
    tl.store(dw_ptr + channels, dw1, mask=inside)
    tl.store(dw_ptr + 2 * channels, dw2, mask=inside)
    tl.store(dw_ptr + 3 * channels, dw3, mask=inside)


def _tap_words(weight: torch.Tensor) -> torch.Tensor:
    """The four BF16 taps of a channel in one word."""
    return weight.to(torch.bfloat16).contiguous().view(torch.int64)


@implements("causal_conv1d_update", "triton")
def triton_causal_conv1d_update(x, weight, states, slots, computed, cu_seqlens) -> torch.Tensor:
    """As :func:`reference_causal_conv1d_update`; without states every sequence starts here."""
    x, (tokens, channels), sequences = unit_stride(x), x.shape, len(cu_seqlens) - 1
    y = torch.empty(tokens, channels, dtype=torch.bfloat16, device=x.device)
    paged = states is not None
    if y.numel():
        tile = _WALK if tokens <= sequences else _FEW_TILE if tokens < _FEW_TOKENS * sequences else _TILE
        tile_tokens, tile_channels = tile
        programs = sequences + (1 if tile == _WALK else ceil_div(tokens, tile_tokens))
        # Pointers of what is absent are never dereferenced.
        _conv_kernel[(programs, ceil_div(channels, tile_channels))](
            x,
            _tap_words(weight),
            *((states, slots, computed) if paged else (x, cu_seqlens, cu_seqlens)),
            cu_seqlens,
            y,
            tokens,
            sequences,
            channels,
            x.stride(0),
            *(states.stride() if paged else (0, 0, 0)),
            int(paged),
            TOKENS=tile_tokens,
            CHANNELS=tile_channels,
            num_warps=_WARPS,
        )
    return y


@implements("causal_conv1d", "triton")
def triton_causal_conv1d(x, weight, cu_seqlens) -> torch.Tensor:
    """As :func:`reference_causal_conv1d`, by the update's kernel."""
    return triton_causal_conv1d_update(x, weight, None, None, None, cu_seqlens)


@implements("causal_conv1d_backward", "triton")
def triton_causal_conv1d_backward(dy, x, weight, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_causal_conv1d_backward`; a program goes along 64 tokens, and three more for dx."""
    x, (tokens, channels), tiles = unit_stride(x), x.shape, ceil_div(len(x), _BACKWARD_TOKENS)
    dx = torch.empty(tokens, channels, dtype=torch.bfloat16, device=x.device)
    dw = torch.empty(tiles, TAPS, channels, dtype=torch.float32, device=x.device)
    if dx.numel():
        _conv_backward_kernel[(tiles, ceil_div(channels, _BACKWARD_CHANNELS))](
            dy.to(torch.bfloat16).contiguous(),
            x,
            _tap_words(weight),
            cu_seqlens,
            dx,
            dw,
            tokens,
            len(cu_seqlens) - 1,
            channels,
            x.stride(0),
            TOKENS=_BACKWARD_TOKENS,
            CHANNELS=_BACKWARD_CHANNELS,
            num_warps=1,
        )
    return dx, dw.sum(dim=0).mT.contiguous()


# --- torch operators --------------------------------------------------------------------------------------------------


_causal_conv1d = dispatched(
    "causal_conv1d(Tensor x, Tensor weight, Tensor cu_seqlens) -> Tensor", fake=lambda x, *_: x.new_empty(x.shape)
)
_causal_conv1d_backward = dispatched(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor cu_seqlens) -> (Tensor, Tensor)",
    fake=lambda dy, x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)),
)


@operator(
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor(a!) states, Tensor slots, Tensor computed,"
    " Tensor cu_seqlens) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
)
def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    computed: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """:func:`causal_conv1d` of the next tokens of requests, for inference.

    Args:
        x: ``[T, C]`` BF16, the requests' new tokens one request after the other. weight: ``[C, 4]``.
        states: ``[slots, 3, C]`` BF16, any strides, written in place: each request's last three inputs, oldest first.
        slots: ``[R]`` int32, of the requests; a negative one is a padded request, whose tokens give zeros.
        computed: ``[R]`` int32, tokens of each request before these. With 0 the slot's content is not read.
        cu_seqlens: ``[R + 1]`` int32. A request without a token leaves its slot as it is.

    Returns:
        ``[T, C]`` BF16.

    Raises:
        TypeError: ``x`` or ``states`` is not BF16. ValueError: shapes that do not fit.
    """
    _check("causal_conv1d_update", x, weight)
    require_bf16("causal_conv1d_update", states=states)
    require_shape("causal_conv1d_update", "states", states, (states.shape[0], TAPS - 1, x.shape[1]))
    require_slots("causal_conv1d_update", slots, computed, cu_seqlens)
    return lookup("causal_conv1d_update", x.device)(x, weight, states, slots, computed, cu_seqlens)


def _check(operation: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    require_bf16(operation, x=x)
    require_shape(operation, "weight", weight, (x.shape[-1], TAPS))


# --- functions --------------------------------------------------------------------------------------------------------


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        keep(ctx, weight, cu_seqlens)
        return _causal_conv1d(x, weight, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        (x,), (weight, cu_seqlens) = ctx.saved_tensors, kept(ctx)
        dx, dw = _causal_conv1d_backward(dy, x, weight, cu_seqlens)
        return dx, as_type(dw, weight.dtype), None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of packed sequences, then SiLU; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[T, C]`` BF16. weight: ``[C, 4]``, oldest tap first, taken at its BF16 value.
        cu_seqlens: ``[B + 1]`` int32, first tokens of the sequences and T.

    Returns:
        ``[T, C]`` BF16. Before a sequence's first token are zeros.

    Raises:
        TypeError: ``x`` is not BF16. ValueError: another shape of ``weight``.
    """
    _check("causal_conv1d", x, weight)
    if torch.is_grad_enabled():
        return _CausalConv1d.apply(x, weight, cu_seqlens)
    return _causal_conv1d(x, weight, cu_seqlens)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's gated delta net on the shared operations, over packed or padded batches.

verl's patch of the decoder layer passes keywords to the attention alone, so a linear layer has a forward of its own.
Under Ulysses a rank runs convolution and rule on all tokens of its key heads and their value heads.
"""

from typing import Any

import torch
from torch import nn

from jetrl_verl import kernels
from jetrl_verl.kernels.views import as_rows
from jetrl_verl.models.families.base import DeltaNet, Family, leaf
from jetrl_verl.nn.handoff import accept_quantized
from jetrl_verl.nn.linear import linear_in, project
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.train import sequence_parallel
from jetrl_verl.train.packing import Packing


def layer_forward(
    self: nn.Module, hidden_states: torch.Tensor, packing: Packing, *, family: Family, **_: Any
) -> torch.Tensor:
    """Decoder layer whose first half is a delta net."""
    part = self.get_submodule
    hidden_states = hidden_states + part(family.attention)(part(family.input_norm)(hidden_states), packing)
    return hidden_states + part(family.second_half)(part(family.post_norm)(hidden_states))


def delta_net_forward(
    self: nn.Module, hidden_states: torch.Tensor | QuantizedTensor, packing: Packing, *, names: DeltaNet
) -> torch.Tensor:
    """``[B, T, hidden]`` of the layer's normed input, quantized for ``qkv`` and ``z`` or not."""

    def part(name: str) -> Any:
        return linear_in(self, leaf(name))

    source = hidden_states.source if isinstance(hidden_states, QuantizedTensor) else hidden_states
    rows = as_rows(source)
    # [B * T, heads, D] each; FP32 [B * T, value heads].
    qkv, z = project(hidden_states, [part(names.qkv), part(names.z)], self.head_v_dim)
    b, a = (kernels.logits(rows, part(name).weight) for name in (names.b, names.a))
    core, norm, out = _core(self, qkv, b, a, packing, names), part(names.norm), part(names.out)
    if accept_quantized((out,)):
        core = out.format.gated_rms_norm(core, z, norm.weight, self.layer_norm_epsilon, out.scale_rule)
    else:
        core = kernels.gated_rms_norm(core, z, norm.weight, self.layer_norm_epsilon)
    return out(core).view(source.shape)


def _core(
    self: nn.Module, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, packing: Packing, names: DeltaNet
) -> torch.Tensor:
    """Convolution and rule, ``[B * T, value heads, D]``, zero at padding."""
    taps = getattr(self, leaf(names.conv)).weight.view(*qkv.shape[1:], -1)
    decay = [getattr(self, leaf(name)) for name in (names.a_log, names.dt_bias)]

    def rule(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        qkv = kernels.causal_conv1d(qkv.flatten(1), taps.flatten(0, 1), packing.cu_seqlens)
        return kernels.gated_delta_rule(qkv, b, a, *decay, packing.cu_seqlens)

    if sequence_parallel.ranks() > 1:
        kinds = (self.num_k_heads, self.num_k_heads, self.num_v_heads)
        qkv = sequence_parallel.join_heads(*qkv.split(kinds, dim=1))
        taps = torch.cat([sequence_parallel.of_rank(heads) for heads in taps.split(kinds)])
        b, a = (x.squeeze(2) for x in sequence_parallel.by_heads(b.unsqueeze(2), a.unsqueeze(2)))
        decay = [sequence_parallel.of_rank(x) for x in decay]
    return sequence_parallel.by_tokens(packing.of_real(rule, qkv, b, a))

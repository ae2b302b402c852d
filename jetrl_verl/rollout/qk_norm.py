# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention blocks with a QK norm: norm, rotary and the write into the KV cache are one launch.

vLLM writes the cache by an operator of its own, ``unified_kv_cache_update``, between rotary and attention. It finds the
cache and the slots by the layer's name in the forward's context, so no compiler sees them. Ours is one operator from
the merged projection to the attention's output, which asks that context likewise. A compiler sees the one tensor that
it mutates, ``out``, and nothing of the model can come between the write and the attention that reads it.

Where vLLM cuts a compiled model at its attention, so that pieces between are captured in CUDA graphs and attention runs
eagerly, it must cut at ours, too: a captured piece would keep the slots' number of its capture
(:func:`split_at_attention`). ``out`` is then made in the piece in front, at an address that the piece behind knows;
queries live inside of the operator. Where a whole step is one CUDA graph, slots are vLLM's persistent buffer, padded
with -1.
"""

import torch
from vllm.config import CompilationConfig
from vllm.model_executor.layers.attention.attention import get_attention_context, unified_attention_with_output
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.operator import operator
from jetrl_verl.reference import QuantizedTensor

REACHES = (
    "vllm.config.compilation:CompilationConfig.splitting_ops",
    "vllm.model_executor.layers.attention.attention:Attention.forward",
    "vllm.model_executor.layers.attention.attention:Attention.layer_name",
    "vllm.model_executor.layers.attention.attention:get_attention_context",
    "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
    "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
)
"""What this file uses of vLLM, or does in its place; scripts/reach.py watches it."""

VLLMS_ATTENTION = "vllm::unified_attention_with_output"
ATTENTION = "jetrl::qk_norm_attention"


@operator(
    "qk_norm_attention(Tensor qkv, Tensor q_weight, Tensor k_weight, float eps, Tensor table, Tensor positions,"
    " Tensor(a!) out, str layer_name) -> ()",
    fake=lambda *_: None,
)
def qk_norm_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    """QK norm, rotary, the write into the KV cache, and attention, of one layer in the forward that vLLM is running.

    Args:
        qkv: ``[N, (Hq + 2 Hk) D]`` BF16, of the merged projection. q_weight, k_weight: ``[D]``. eps: of both norms.
        table: ``[P, D]`` BF16 of ``kernels.rotary_table``. positions: ``[N]`` int64 or int32, below P.
        out: ``[N, Hq D]`` BF16, written in place; the rows of padding mean nothing.
        layer_name: of vLLM's attention layer, whose implementation is one of ours.
    """
    _, layer, kv_cache, slots = get_attention_context(layer_name)
    width, kv_heads = layer.head_size, layer.num_kv_heads
    q, k, v = qkv.unflatten(-1, (-1, width)).split([layer.num_heads, kv_heads, kv_heads], dim=1)
    parameters = q_weight, k_weight, eps, table, positions.flatten()
    if slots is None:  # memory is being profiled, and there is no cache
        q, _ = kernels.norm_rotary(q, k, *parameters)
    else:
        q = layer.impl.norm_rotary_write((q, k, v, *parameters), kv_cache, slots)
    # Keys and values are in the cache. Whatever wants them from elsewhere fails.
    unified_attention_with_output(q, None, None, out.unflatten(-1, (-1, width)), layer_name)


def split_at_attention(config: CompilationConfig) -> None:
    """Let vLLM cut a compiled model at :func:`qk_norm_attention` where it does at its own attention, in place."""
    if VLLMS_ATTENTION in (config.splitting_ops or ()) and ATTENTION not in config.splitting_ops:
        config.splitting_ops.append(ATTENTION)


class _SharedHeads:
    """Mixed in front of vLLM's attention blocks with a QK norm.

    Attributes:
        parts: names in the block of the merged projection, the norms of queries and of keys, rotary, attention and the
            output projection.
        one_by_one: whether norms, rotary, the write and attention are modules with launches of their own, which has the
            same bits. ``jetrl diff`` records what is between them.
    """

    parts: tuple[str, ...]
    one_by_one = False

    def check(self) -> None:
        _, q_norm, k_norm, *_ = self._parts()
        if q_norm.variance_epsilon != k_norm.variance_epsilon:
            refuse("norm_in_vllm")

    def _parts(self) -> list[torch.nn.Module]:
        return [getattr(self, name) for name in self.parts]

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        merged, q_norm, k_norm, rotary, core, output = self._parts()
        if self.one_by_one:
            return super().forward(positions, hidden_states)
        qkv, _ = merged(hidden_states)
        out = qkv.new_empty(len(qkv), self.q_size)
        weights, eps = (q_norm.weight, k_norm.weight), q_norm.variance_epsilon
        qk_norm_attention(qkv, *weights, eps, rotary.cos_sin_cache, positions, out, core.layer_name)
        return output(out)[0]


class SharedQwen3Attention(_SharedHeads, Qwen3Attention):
    """Of Qwen3."""


class SharedQwen3MoeAttention(_SharedHeads, Qwen3MoeAttention):
    """Of its mixtures."""

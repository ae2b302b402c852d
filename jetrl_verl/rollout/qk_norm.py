# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention blocks with a QK norm: norm, rotary and the write into the KV cache are one launch.

One operator reaches from the merged projection to the attention's output, so nothing comes between the write and the
attention that reads it. Like vLLM's ``unified_kv_cache_update`` it gets cache and slots by the layer's name from the
forward's context. vLLM must cut a compiled model here as at its own attention (:func:`split_at_attention`): a captured
piece would keep the slots of its capture.
"""

import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.operator import operator
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.rollout import vllm_compat as vllm

REACHES = (
    "vllm.config.compilation:CompilationConfig.splitting_ops",
    "vllm.model_executor.layers.attention.attention:Attention.forward",
    "vllm.model_executor.layers.attention.attention:Attention.layer_name",
    "vllm.model_executor.layers.attention.attention:get_attention_context",
    "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
    "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
)
"""What this file uses of vLLM, or does instead of it; scripts/reach.py watches it."""

VLLMS_ATTENTION, ATTENTION = "vllm::unified_attention_with_output", "jetrl::qk_norm_attention"
VLLMS_DELTA_NET, DELTA_NET = "vllm::qwen_gdn_attention_core", "jetrl::delta_net"


def heads_of(qkv: torch.Tensor, layer: vllm.Attention) -> tuple[torch.Tensor, ...]:
    """Queries ``[N, Hq, D]``, keys and values ``[N, Hk, D]`` in a merged projection; a query's gate follows it."""
    width, kv_heads = layer.head_size, layer.num_kv_heads
    q, k, v = qkv.unflatten(-1, (-1, width)).tensor_split([-2 * kv_heads, -kv_heads], dim=1)
    return q.unflatten(1, (layer.num_heads, -1))[:, :, 0], k, v


@operator(
    "qk_norm_attention(Tensor qkv, Tensor q_weight, Tensor k_weight, float eps, Tensor table, Tensor positions,"
    " bool unit_offset, Tensor(a!) out, str layer_name) -> ()",
    fake=lambda *_: None,
    backends=None,
)
def qk_norm_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    unit_offset: bool,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    """QK norm, rotary, the write into the KV cache, and attention, of one layer in the forward that vLLM is running.

    Args:
        qkv: ``[N, (Hq + 2 Hk) D]`` BF16, output of the merged projection; with gates ``[N, (2 Hq + 2 Hk) D]``.
        q_weight, k_weight: ``[D]``. eps, unit_offset: of both norms. table: ``[P, R]`` BF16, from
            ``kernels.rotary_table``.
        positions: ``[N]`` int64 or int32, below P.
        out: ``[N, Hq D]`` BF16, written in place; rows of padding are undefined.
        layer_name: of the attention layer, whose implementation has ``norm_rotary_write``.
    """
    _, layer, kv_cache, slots = vllm.get_attention_context(layer_name)
    q, k, v = heads_of(qkv, layer)
    parameters = q_weight, k_weight, eps, table, positions, unit_offset
    if slots is None:  # vLLM profiles memory, and there is no cache
        q, _ = kernels.norm_rotary(q, k, *parameters)
    else:
        q = layer.impl.norm_rotary_write((q, k, v, *parameters), kv_cache, slots)
    # Keys and values are read from the cache alone.
    vllm.unified_attention_with_output(q, None, None, out.unflatten(-1, (-1, layer.head_size)), layer_name)


def split_at_attention(config: vllm.CompilationConfig) -> None:
    """Make vLLM cut a compiled model at our operators if it cuts at its own of the same purpose, in place."""
    for stock, shared in ((VLLMS_ATTENTION, ATTENTION), (VLLMS_DELTA_NET, DELTA_NET)):
        if stock in (config.splitting_ops or ()) and shared not in config.splitting_ops:
            config.splitting_ops.append(shared)


class SharedHeads:
    """Mixin of vLLM's attention blocks with a QK norm.

    Attributes:
        parts: the block's names of merged projection, query norm, key norm, rotary, attention and output projection.
        one_by_one: run each as a module of its own, with the same bits, so that ``jetrl diff`` can record between them.
    """

    parts: tuple[str, ...]
    one_by_one = False

    def check(self) -> None:
        _, q_norm, k_norm, *_ = self._parts()
        if q_norm.variance_epsilon != k_norm.variance_epsilon:
            refuse("operation_replaced_in_vllm", what="a norm of queries with another eps than that of keys")

    def _parts(self) -> list[torch.nn.Module]:
        return [getattr(self, name) for name in self.parts]

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        merged, q_norm, k_norm, rotary, core, output = self._parts()
        qkv, _ = merged(hidden_states)
        if self.one_by_one:
            q, k, v = heads_of(qkv, core)
            out = core(*rotary(positions, q_norm(q).flatten(1), k_norm(k).flatten(1)), v.flatten(1))
        else:
            out = qkv.new_empty(len(qkv), self.q_size)
            norms = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
            where = *rotary.angles(positions), q_norm.unit_offset
            qk_norm_attention(qkv, *norms, *where, out, core.layer_name)
        return output(self.before_output(out, qkv))[0]

    def before_output(self, out: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor | QuantizedTensor:
        """What the output projection reads, of the attention's output ``[N, Hq D]`` and the merged projection."""
        return out


class SharedQwen3Attention(SharedHeads, vllm.Qwen3Attention):
    """Qwen3."""


class SharedQwen3MoeAttention(SharedHeads, vllm.Qwen3MoeAttention):
    """Qwen3's mixtures of experts."""

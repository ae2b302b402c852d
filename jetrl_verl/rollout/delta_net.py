# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's hybrid models with the shared operations: gated delta nets, attention with an output gate, mixtures with a
shared expert, decoder layers.

One operator updates a layer's states for all requests of a step, prompts and decodes alike. Like vLLM's it gets states
and requests by the layer's name from the forward's context, so vLLM must cut a compiled model at it
(qk_norm.split_at_attention). vLLM's classes read the GPU when they are imported: import this module after vLLM has
loaded a hybrid.
"""

from dataclasses import dataclass
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.operator import operator
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.reference.delta_net import HEAD, TAPS, state_shape
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.experts import SharedMixture
from jetrl_verl.rollout.handoff import ReadByLinear
from jetrl_verl.rollout.qk_norm import SharedHeads

REACHES = (
    "vllm.config.cache:CacheConfig.block_size",
    "vllm.config.cache:CacheConfig.user_specified_block_size",
    "vllm.forward_context:ForwardContext.attn_metadata",
    "vllm.forward_context:ForwardContext.no_compile_layers",
    "vllm.model_executor.models.qwen2_moe:Qwen2MoeMLP.forward",
    "vllm.model_executor.models.qwen3_next:Qwen3NextModel.forward",
    "vllm.platforms.interface:Platform._align_hybrid_block_size",
    "vllm.platforms.interface:Platform.update_block_size_for_backend",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
)
"""What this file uses of vLLM through values, or relies on; scripts/reach.py watches it."""

_stock = vllm.gated_delta_net()
_backend = vllm.gated_delta_net_backend()
_hybrid = vllm.hybrid_decoder()


@dataclass
class Requests:
    """What a layer reads of the requests of one step.

    Attributes:
        tokens: of all requests; rows after them are padding.
        slots: ``[R]`` int32, states of a request; -1 for a padded request of a CUDA graph.
        computed: ``[R]`` int32, tokens before this step; without any, what the slot holds is not the request's.
        cu_seqlens: ``[R + 1]`` int32, first tokens of the requests, and ``tokens``.
    """

    tokens: int
    slots: torch.Tensor
    computed: torch.Tensor
    cu_seqlens: torch.Tensor


class RequestsBuilder(vllm.AttentionMetadataBuilder[Requests]):
    """Builds :class:`Requests` in buffers that stay where they are, since CUDA graphs of decodes keep their places.

    Each step writes all that it reads: vLLM may make builders in the memory of the KV cache, which sleep discards.
    """

    _cudagraph_support = vllm.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        self._slots, self._computed, self._cu_seqlens = torch.zeros(3, most + 1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: vllm.CommonAttentionMetadata, fast_build: bool = False
    ) -> Requests:
        step = common_attn_metadata
        count, mode = step.num_reqs, self.vllm_config.cache_config.mamba_cache_mode
        pages = vllm.mamba_get_block_table_tensor(step.block_table_tensor, step.seq_lens, self.kv_cache_spec, mode)
        slots, computed = self._slots[:count], self._computed[:count]
        slots.copy_(pages[:count, 0])
        slots.masked_fill_(slots == vllm.NULL_BLOCK_ID, -1)
        starts = step.query_start_loc[: count + 1]
        torch.sub(step.seq_lens[:count], starts.diff(), out=computed)
        # In vLLM's offsets a padded request of a graph has no token; here it has the padded row.
        if step.max_query_len == 1 and step.num_actual_tokens == count:
            starts = torch.arange(count + 1, out=self._cu_seqlens[: count + 1])
        return Requests(step.num_actual_tokens, slots, computed, starts)


class SharedDeltaNetBackend(_backend.GDNAttentionBackend):
    """vLLM's backend of these layers with :class:`RequestsBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[RequestsBuilder]:
        return RequestsBuilder


@operator(
    "delta_net(Tensor qkv, Tensor b, Tensor a, Tensor(a!) out, str layer_name) -> ()",
    fake=lambda *_: None,
    backends=None,
)
def delta_net(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    """Convolution and delta rule of one layer in the forward that vLLM is running; its states are updated.

    Args:
        qkv: ``[N, C]`` BF16, part of the merged projection. b, a: ``[N, HV]`` FP32.
        out: ``[N, HV, 128]`` BF16, written in place; rows of padding become zero.
        layer_name: of the layer, a :class:`SharedDeltaNet`.
    """
    context = vllm.get_forward_context()
    requests = (context.attn_metadata or {}).get(layer_name)
    if requests is None:  # vLLM profiles memory, and there are no states
        out.zero_()
        return
    layer, tokens = context.no_compile_layers[layer_name], requests.tokens
    conv_states, states = layer.kv_cache
    step = requests.slots, requests.computed, requests.cu_seqlens
    qkv = kernels.causal_conv1d_update(qkv[:tokens], layer.conv1d.weight.flatten(1), conv_states, *step)
    decay = layer.A_log, layer.dt_bias
    kernels.gated_delta_rule_update(qkv, b[:tokens], a[:tokens], *decay, states, *step, out[:tokens])
    out[tokens:] = 0


class SharedDeltaNet(_stock.QwenGatedDeltaNetAttention):
    """Qwen3.5's gated delta net.

    Attributes:
        parts: its names of the merged input projections and of the output projection.
    """

    parts: tuple[str, ...]

    def check(self) -> None:
        """Refuse a layer that the trainer cannot reproduce."""
        heads, keys = self.num_v_heads // self.tp_size, self.num_k_heads // self.tp_size
        stock, shapes = super().get_state_shape(), ((TAPS - 1, (heads + 2 * keys) * HEAD), (heads, HEAD, HEAD))
        dtypes = torch.bfloat16, torch.float32
        for what, met in (
            ("a delta net with interleaved projections", self.gqa_interleaved_layout),
            (f"the gate {self.norm.activation} of a delta net", self.norm.activation not in ("silu", "swish")),
            (f"the activation {self.activation} of a convolution", self.activation != "silu"),
            ("a convolution with a bias", self.conv1d.bias is not None),
            (f"a delta net with states {stock}", tuple(stock) != shapes),
            (f"a delta net with states in {self.get_state_dtype()}", self.get_state_dtype() != dtypes),
        ):
            if met:
                refuse("operation_replaced_in_vllm", what=what)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return super().get_state_shape()[0], state_shape(self.num_v_heads // self.tp_size)

    def get_attn_backend(self) -> type[SharedDeltaNetBackend]:
        return SharedDeltaNetBackend

    def forward(self, hidden_states: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        """Rows ``[N, H]`` BF16, or qdata with its BF16 rows as source -> ``[N, H]`` BF16."""
        quantized = isinstance(hidden_states, QuantizedTensor)
        rows = hidden_states.source if quantized else hidden_states
        project, gates, output = [getattr(self, name) for name in self.parts]
        qkvz, _ = project(hidden_states)
        b, a = kernels.logits(rows, gates.weight).chunk(2, dim=-1)
        values = self.value_dim // self.tp_size
        qkv, z = qkvz[:, :-values], qkvz[:, -values:].unflatten(-1, (-1, self.head_v_dim))
        out = z.new_empty(z.shape)
        delta_net(qkv, b, a, out, self.prefix)
        return output(self.norm(out, z))[0]


def fit_blocks(vllm_config: Any) -> None:
    """Raise vLLM's block size to the tokens whose keys and values take as many bytes as a state of these layers.

    After vLLM has loaded the model, ``update_block_size_for_backend`` keeps a block size that is specified, and
    ``_align_hybrid_block_size`` pads states to blocks. Its own blocks would be too small: it asks the model's class,
    which names the state of vLLM's layer.
    """
    cache, layers = vllm_config.cache_config, vllm_config.compilation_config.static_forward_context.values()
    of_states, of_keys = (
        max(layer.get_kv_cache_spec(vllm_config).page_size_bytes for layer in layers if isinstance(layer, kind))
        for kind in (SharedDeltaNet, vllm.Attention)
    )
    cache.block_size *= -(-of_states // of_keys)
    cache.user_specified_block_size = True


class SharedHybridLayer(_hybrid.Qwen3_5DecoderLayer):
    """A decoder layer of either kind whose norms may hand over qdata.

    Attributes:
        parts: its names of the norms before its halves.
    """

    parts: tuple[str, ...]

    def check(self) -> None:
        if self.layer_scale:
            refuse("operation_replaced_in_vllm", what="a decoder layer that scales its halves")

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Output of the MLP, residual sum before it), both ``[N, H]`` BF16."""
        first, second = [getattr(self, name) for name in self.parts]
        if residual is None:
            residual, hidden_states = hidden_states, first(hidden_states)
        else:
            hidden_states, residual = first(hidden_states, residual)
        if self.layer_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states)
        else:
            hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = second(hidden_states, residual)
        return self.mlp(hidden_states), residual


class SharedGatedAttention(SharedHeads, ReadByLinear, _hybrid.Qwen3NextAttention):
    """Qwen3.5's attention, whose merged projection has, for each head, a query and then its gate.

    It returns its result; vLLM's own may write into an argument instead.
    """

    def check(self) -> None:
        super().check()
        if not self.attn_output_gate:
            refuse("operation_replaced_in_vllm", what="an attention without its output gate")

    def before_output(self, out: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor | QuantizedTensor:
        heads = qkv[:, : 2 * self.q_size].unflatten(1, (self.num_heads, 2, -1))
        operands = out.unflatten(1, (self.num_heads, -1)), heads[:, :, 1]
        if self.reader_format is None:
            return kernels.sigmoid_mul(*operands)
        return self.reader_format.sigmoid_mul(*operands, self.reader_rule, with_product=self.keeps_rows)


class SharedHybridMixture(SharedMixture, _hybrid.Qwen3NextSparseMoeBlock):
    """Qwen3.5's, with a shared expert."""


SHARED: dict[type, type] = {
    _hybrid.Qwen3NextAttention: SharedGatedAttention,
    _hybrid.Qwen3NextSparseMoeBlock: SharedHybridMixture,
    _stock.QwenGatedDeltaNetAttention: SharedDeltaNet,
    _hybrid.Qwen3_5DecoderLayer: SharedHybridLayer,
}
"""vLLM's class -> its subclass with another forward."""

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
"""Puts the shared operations (jetrl_verl/ops) into a stock Hugging Face decoder, in place.

The model stays the class that Hugging Face built: same modules, parameters, names, checkpoints. Single modules get
another ``forward``: the norms, the MLP's activation, rotary, attention and ``lm_head``. Residual additions, the
embedding and the layers' order are stock, BF16 on both sides already.

Where an FP8 linear reads what a norm or the activation writes, that operation quantises its result on the way and
hands the codes to the linear (``linear.remember_codes``). Between the modules flows the same BF16 tensor as ever, so
autograd, hooks and checkpointing see nothing of it, and the bits are those of quantising afterwards.

Attention needs to know where sequences begin. That is found once per pass, by a hook on the decoder, from the attention
mask (padded batches) or from positions that start again at zero (packed ones), and travels to every layer as a keyword
argument; no mask is ever built, because ``_attn_implementation`` names none of Hugging Face's. transformers knows the
name all the same: verl saves ``hf_model`` through a model that it makes from this configuration and never runs.
"""

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from jetrl_verl import ops
from jetrl_verl.layers import UnsupportedLayer
from jetrl_verl.linear import JetLinear, remember_codes
from jetrl_verl.ops.rms_norm import rms_norm_quantize_1x128
from jetrl_verl.train.gated_mlp import gated_product, spans

ATTENTION = "jetrl_shared"
"""Value of ``_attn_implementation``. Hugging Face builds no mask for a name that its mask interface does not know."""


@dataclass(frozen=True)
class Packing:
    """Where a batch's sequences are.

    Attributes:
        tokens: indices of the real tokens among ``B * T``, None when all are real.
        cu_seqlens: ``[sequences + 1]`` int32, first real token of each sequence and, last, their number.
        max_seqlen: length of the longest.
    """

    tokens: torch.Tensor | None
    cu_seqlens: torch.Tensor
    max_seqlen: int

    @classmethod
    def of(cls, positions: torch.Tensor, attention_mask: torch.Tensor | None) -> "Packing":
        """From position ids ``[B, T]`` and, for padded batches, the mask ``[B, T]`` of real tokens."""
        if attention_mask is None:
            # A row's first token always starts a sequence, whatever its position.
            starts = positions == 0
            starts[:, 0] = True
            total, tokens = positions.numel(), None
            first = starts.flatten().nonzero().squeeze(1)
        else:
            lengths = attention_mask.to(torch.int64).sum(dim=1)
            tokens = attention_mask.to(torch.bool).flatten().nonzero().squeeze(1)
            total = len(tokens)
            lengths = lengths[lengths > 0]
            first = lengths.cumsum(0) - lengths
        cu_seqlens = torch.cat([first, first.new_tensor([total])]).to(torch.int32)
        return cls(tokens, cu_seqlens, int(cu_seqlens.diff().max()))


def _find_sequences(decoder: nn.Module, inputs: tuple, arguments: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: adds ``position_ids`` where absent, and ``packing``."""
    if inputs:
        raise TypeError("shared operations: call the model with keyword arguments")
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        raise ValueError("shared operations: the trainer's model does not generate; pass use_cache=False")
    tokens = arguments.get("input_ids")
    tokens = tokens if tokens is not None else arguments["inputs_embeds"][..., 0]
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    positions = positions.expand(tokens.shape[:2])
    packing = Packing.of(positions, arguments.get("attention_mask"))
    return inputs, {
        **arguments,
        "use_cache": False,
        "attention_mask": None,
        "position_ids": positions,
        "packing": packing,
    }


def _norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _norm_forward_for(self: nn.Module, hidden_states: torch.Tensor, *, reader: nn.Linear) -> torch.Tensor:
    """Of a norm whose result ``reader`` and the layers merged with it are the only ones to read."""
    if not isinstance(reader, JetLinear):  # anew in every call: a BF16 shadow forward turns the layers back for a while
        return _norm_forward(self, hidden_states)
    rule = reader.scale_rule
    normed, codes = rms_norm_quantize_1x128(hidden_states, self.weight, self.variance_epsilon, rule)
    remember_codes(normed, codes, rule)
    return normed


def _mlp_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    down = self.down_proj
    if spans(x, self.gate_proj, self.up_proj, down):
        product, codes = gated_product(x, self.gate_proj, self.up_proj)
    elif isinstance(down, JetLinear):
        product, codes = ops.silu_mul_quantize_1x128(self.gate_proj(x), self.up_proj(x), down.scale_rule)
    else:
        return down(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))
    remember_codes(product, codes, down.scale_rule)
    return down(product)


def _rotary_forward(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Table ``[P, D]`` and positions ``[B * T]``: what the layers get as ``position_embeddings``."""
    # Not a buffer: FSDP would cast it, and its type is part of the contract.
    self.shared_table = self.shared_table.to(x.device)
    return self.shared_table, position_ids.flatten()


def _attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    packing: Packing,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    def heads(projected: torch.Tensor, norm: str = "") -> torch.Tensor:
        """[B * T, heads, D], QK norm applied where the model has one."""
        split = projected.reshape(-1, projected.shape[-1] // self.head_dim, self.head_dim)
        return getattr(self, norm)(split) if hasattr(self, norm) else split

    q = heads(self.q_proj(hidden_states), "q_norm")
    k = heads(self.k_proj(hidden_states), "k_norm")
    v = heads(self.v_proj(hidden_states))
    q, k = ops.rotary(q, k, *position_embeddings)
    if packing.tokens is None:
        out = ops.attention(q, k, v, packing.cu_seqlens, packing.max_seqlen, self.scaling)
    else:
        q_real, k_real, v_real = (x.index_select(0, packing.tokens) for x in (q, k, v))
        real = ops.attention(q_real, k_real, v_real, packing.cu_seqlens, packing.max_seqlen, self.scaling)
        out = torch.zeros_like(q).index_copy(0, packing.tokens, real)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _logits_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return ops.logits(hidden_states, self.weight)


def _refuse_attention(*_: Any, **__: Any) -> None:
    """What ``ATTENTION`` stands for in a model whose modules are all stock."""
    raise RuntimeError(
        "shared operations: a model made from the trainer's configuration can be saved and not run; load the saved "
        "folder, which names no attention"
    )


def share_operations(model: nn.Module) -> dict[str, int]:
    """Put the shared operations in place.

    Args:
        model: a Hugging Face causal language model of type llama, mistral, qwen2 or qwen3, before FSDP wraps it.

    Returns:
        How many modules of each kind now run a shared operation.

    Raises:
        UnsupportedLayer: the model has something that no shared operation covers.
    """
    from transformers import AttentionInterface

    config = model.config
    try:
        ops.check_model(config)
    except ValueError as uncovered:
        raise UnsupportedLayer(str(uncovered)) from None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head.bias is not None:
        raise UnsupportedLayer(
            "the shared operations do not cover a bias on lm_head; use precision=jet_fp8 jetrl.operations=stock"
        )
    counts = {"norm": 0, "mlp": 0, "attention": 0}

    def replace(kind: str, module: nn.Module, forward: Any) -> None:
        module.forward = MethodType(forward, module)
        counts[kind] = counts.get(kind, 0) + 1

    for module in decoder.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            replace("norm", module, _norm_forward)
        elif kind.endswith("MLP"):
            replace("mlp", module, _mlp_forward)
        elif kind.endswith("Attention"):
            replace("attention", module, _attention_forward)
    layers = len(decoder.layers)
    norms = 1 + layers * (4 if hasattr(decoder.layers[0].self_attn, "q_norm") else 2)
    if counts != {"norm": norms, "mlp": layers, "attention": layers}:
        raise UnsupportedLayer(
            f"a {type(model).__name__} of {layers} layers has {counts['norm']} norms, {counts['mlp']} MLPs and "
            f"{counts['attention']} attention modules, which is not a dense decoder; use precision=jet_fp8 "
            "jetrl.operations=stock"
        )
    for layer in decoder.layers:
        for norm, reader in (
            (layer.input_layernorm, layer.self_attn.q_proj),
            (layer.post_attention_layernorm, layer.mlp.gate_proj),
        ):
            norm.forward = MethodType(partial(_norm_forward_for, reader=reader), norm)
    rotary = decoder.rotary_emb
    head_dim = decoder.layers[0].self_attn.head_dim
    rotary.shared_table = ops.rotary_table(head_dim, config.max_position_embeddings, config.rope_parameters)
    replace("rotary", rotary, _rotary_forward)
    replace("logits", head, _logits_forward)
    # Not with AttentionMaskInterface: masks would be built then.
    AttentionInterface.register(ATTENTION, _refuse_attention)
    config._attn_implementation = ATTENTION
    decoder.register_forward_pre_hook(_find_sequences, with_kwargs=True)
    return counts

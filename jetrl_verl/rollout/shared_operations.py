# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces single modules of a loaded vLLM model by ones that run the shared operations (jetrl_verl/kernels).

Each class below is vLLM's own with another forward; parameters, names and layer order stay, and nothing is registered
with vLLM or torch, so another engine of the process keeps vLLM's classes. It runs after loading and before tracing,
graph capture and the choice of the KV cache. If an FP8 linear layer alone reads what a norm or the activation writes,
that operation quantizes its result and hands over a :class:`jetrl_verl.reference.QuantizedTensor`.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.config.support.table import refuse
from jetrl_verl.formats.caches import KVCache
from jetrl_verl.models import family
from jetrl_verl.models.families.base import Family, leaf, read
from jetrl_verl.reference import QuantizedTensor, UncombinedRows
from jetrl_verl.rollout import vllm_compat as vllm
from jetrl_verl.rollout.attention import share_attention_layers
from jetrl_verl.rollout.experts import JetExpertsMethod, SharedMixture, SharedQwen3Mixture
from jetrl_verl.rollout.handoff import ReadByLinear
from jetrl_verl.rollout.method import JetLinearMethod
from jetrl_verl.rollout.qk_norm import SharedQwen3Attention, SharedQwen3MoeAttention

_MODEL = "the model of this engine"
"""The model, in a message about a layer of it."""


class _SharedNorm(ReadByLinear):
    """Mixin of vLLM's norms: residual addition and RMSNorm over whole rows, with a weight.

    Attributes:
        unit_offset: whether the factor of a normalized row is ``1 + weight``.
    """

    unit_offset = False

    def _forward_shared(self, x: torch.Tensor | UncombinedRows, residual: torch.Tensor | None = None):
        weight, eps, reader, rule = self.weight, self.variance_epsilon, self.reader_format, self.reader_rule
        offset = {"unit_offset": self.unit_offset}
        if isinstance(x, UncombinedRows):  # after a mixture, so with a residual
            call = *x, residual, weight, eps
            if reader is None:
                return kernels.combine_add_rms_norm(*call, **offset)
            return reader.combine_add_rms_norm(*call, rule, with_normed=self.keeps_rows, **offset)
        if residual is None:
            if reader is None:
                return kernels.rms_norm(x, weight, eps, **offset)
            return reader.rms_norm(x, weight, eps, rule, **offset)
        if reader is None:
            return kernels.add_rms_norm(x, residual, weight, eps, **offset)
        return reader.add_rms_norm(x, residual, weight, eps, rule, with_normed=self.keeps_rows, **offset)


class SharedRMSNorm(_SharedNorm, vllm.RMSNorm):
    """Factor ``weight``."""

    def check(self) -> None:
        if self.variance_size_override is not None or not self.has_weight:
            refuse("operation_replaced_in_vllm", what="a norm without a weight or over a part of a row")


class SharedGemmaRMSNorm(_SharedNorm, vllm.GemmaRMSNorm):
    """Factor ``1 + weight``; no subclass of the other."""

    unit_offset = True


class SharedRMSNormGated(ReadByLinear, vllm.RMSNormGated):
    """RMSNorm of each head of a delta net, times ``silu(z)``."""

    def check(self) -> None:
        gate = self.activation in ("silu", "swish") and self.norm_before_gate
        if not gate or self.group_size is not None or self.bias is not None:
            refuse("operation_replaced_in_vllm", what="a gated norm other than ``norm(x) * silu(z)`` of whole heads")

    def _forward_shared(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor | QuantizedTensor:
        if self.reader_format is None:
            return kernels.gated_rms_norm(x, z, self.weight, self.eps)
        return self.reader_format.gated_rms_norm(x, z, self.weight, self.eps, self.reader_rule)


class SharedSiluAndMul(ReadByLinear, vllm.SiluAndMul):
    """``silu(gate) * up`` of ``[M, 2 N]``."""

    def _forward_shared(self, x: torch.Tensor) -> torch.Tensor | QuantizedTensor:
        gate, up = x.chunk(2, dim=-1)
        if self.reader_format is None:
            return kernels.silu_mul(gate, up)
        return self.reader_format.silu_mul(gate, up, self.reader_rule, with_product=self.keeps_rows)


class _SharedRotary:
    """Mixin of vLLM's rotary classes."""

    def check(self) -> None:
        if not self.is_neox_style:
            refuse("operation_replaced_in_vllm", what="rotary of interleaved pairs")

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A table and the tokens' rows in it, from vLLM's ``positions``: ``[N]``, or ``[3, N]`` equal for text."""
        return self.cos_sin_cache, positions[0] if positions.ndim == 2 else positions

    def _forward_shared(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
        heads = (x.unflatten(-1, (-1, self.head_size)) for x in (query, key))
        rotated = kernels.rotary(*heads, *self.angles(positions))
        return tuple(x.flatten(1) for x in rotated)


class SharedRotaryEmbedding(_SharedRotary, vllm.RotaryEmbedding):
    """Rotary with one frequency per pair of elements."""


class SharedLlama3RotaryEmbedding(_SharedRotary, vllm.Llama3RotaryEmbedding):
    """Rotary with Llama 3's scaled frequencies, which are in the table."""


class SharedMRotaryEmbedding(_SharedRotary, vllm.MRotaryEmbedding):
    """Rotary of mRoPE, whose three rows of positions are equal for text.

    Attributes:
        position_rows: ``VisionFamily.position_rows`` of an engine that accepts images; None for text alone.
    """

    position_rows: torch.Tensor | None

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.position_rows is None or positions.ndim == 1:
            return super().angles(positions)
        return kernels.table_of_tokens(self.cos_sin_cache, positions, self.position_rows)

    def check(self) -> None:
        super().check()
        if self.scaling_factor is not None:
            refuse("rope_type", what=_MODEL, why="the shared operations do not cover YaRN")


class SharedLogitsProcessor(vllm.LogitsProcessor):
    """Logits in FP32."""

    def check(self) -> None:
        for row, wrong, what in (
            ("soft_cap", self.soft_cap is not None, "soft-capped logits"),
            ("logit_scale", self.scale != 1.0, "scaled logits"),
        ):
            if wrong:
                refuse(row, what=_MODEL, why=f"the shared operations do not cover {what}")

    def _get_logits(self, hidden_states, lm_head, embedding_bias, skip_gather=False):
        """``[N, V]`` FP32 without padding; None on a rank that vLLM does not gather on; a rank's columns if asked to.

        A column is one dot product on any rank, so tensor parallelism does not change bits.
        """
        logits = kernels.logits(hidden_states, lm_head.weight)
        if skip_gather:
            return logits
        logits = self._gather_logits(logits)
        return None if logits is None else logits[..., : self.org_vocab_size]


REACHES = ("vllm.model_executor.custom_op:CustomOp._forward_method",)
"""What this file uses of vLLM through values; scripts/reach.py watches it."""

_SHARED: dict[type, type] = {
    vllm.RMSNorm: SharedRMSNorm,
    vllm.GemmaRMSNorm: SharedGemmaRMSNorm,
    vllm.RMSNormGated: SharedRMSNormGated,
    vllm.SiluAndMul: SharedSiluAndMul,
    vllm.RotaryEmbedding: SharedRotaryEmbedding,
    vllm.Llama3RotaryEmbedding: SharedLlama3RotaryEmbedding,
    vllm.MRotaryEmbedding: SharedMRotaryEmbedding,
    vllm.LogitsProcessor: SharedLogitsProcessor,
    vllm.Qwen3Attention: SharedQwen3Attention,
    vllm.Qwen3MoeAttention: SharedQwen3MoeAttention,
    vllm.Qwen3MoeSparseMoeBlock: SharedQwen3Mixture,
}
"""vLLM's class -> its subclass with another forward, of every model; those of hybrids are in delta_net.py."""


def _share(module: torch.nn.Module, classes: Mapping[type, type] = _SHARED) -> None:
    """Give one module its class of ``classes``, in place."""
    shared = classes.get(type(module))
    if shared is None:
        refuse("operation_replaced_in_vllm", what=f"the layer {type(module).__name__}")
    module.__class__ = shared
    module.check()
    if isinstance(module, vllm.CustomOp):
        # Overrides what custom_ops chose among vLLM's own forwards.
        module._forward_method = module._forward_shared


def _own_rotary(stock: vllm.RotaryEmbeddingBase, config: Any, images: bool) -> vllm.RotaryEmbeddingBase:
    """A copy with the shared table; vLLM keeps ``stock`` for every engine of the process."""
    own = copy.copy(stock)
    # A shallow copy shares the dictionary.
    own._buffers = {}
    _share(own)
    if own.rotary_dim != family(config).rotary_dim(config):
        part = f"rotary of {own.rotary_dim} of the {own.head_size} features of a head"
        refuse("partial_rotary", what=_MODEL, why=f"its configuration does not say {part}")
    # Of as many positions as the trainer's; MRotaryEmbedding has four times as many.
    positions = read(config, "max_position_embeddings")
    table = kernels.rotary_table(own.rotary_dim, positions, read(config, "rope_parameters"))
    device = stock.cos_sin_cache.device
    own.register_buffer("cos_sin_cache", table.to(device), persistent=False)
    if isinstance(own, SharedMRotaryEmbedding):
        rows = torch.tensor(family(config).position_rows(config), device=device) if images else None
        own.register_buffer("position_rows", rows, persistent=False)
    return own


def _outside_of_a_tower(model: torch.nn.Module, decoder: Family) -> list[torch.nn.Module]:
    """The modules of a model without those of a vision tower, which stays vLLM's."""
    tower = decoder.rollout_name(f"{decoder.tower}.")
    return [module for name, module in model.named_modules() if not f"{name}.".startswith(tower) or tower == "."]


_EVERYWHERE = (vllm.RMSNorm, vllm.GemmaRMSNorm, vllm.RMSNormGated, vllm.SiluAndMul, vllm.LogitsProcessor)
"""Classes that are replaced wherever a model has them."""


def _check_norm(norm: torch.nn.Module, names: Family) -> None:
    """Refuse a norm of a class that :func:`_share` does not know, which would stay vLLM's, or not its family's."""
    if not isinstance(norm, _SharedNorm) or norm.unit_offset != names.unit_offset:
        refuse("operation_replaced_in_vllm", what=f"a norm of the class {type(norm).__name__}")


def share_operations(
    model: torch.nn.Module, config: Any, kv_cache: KVCache | None = None, images: bool = False
) -> None:
    """Make a loaded vLLM model run the shared operations, in place.

    Args:
        model: vLLM's model of one worker, not traced yet.
        config: its Hugging Face configuration.
        kv_cache: format of the KV cache; None for BF16.
        images: whether the engine accepts images.

    Raises:
        UnsupportedConfiguration: a layer that the shared operations do not cover.
    """
    decoder = family(config)
    rotaries: dict[torch.nn.Module, torch.nn.Module] = {}
    for parent in _outside_of_a_tower(model, decoder):
        for name, module in parent.named_children():
            if isinstance(module, vllm.RotaryEmbeddingBase):
                if module not in rotaries:
                    rotaries[module] = _own_rotary(module, config, images)
                setattr(parent, name, rotaries[module])
    for module in _outside_of_a_tower(model, decoder):
        if isinstance(module, _EVERYWHERE):
            _share(module)
    share_attention_layers(model, kv_cache)
    _check_norm(decoder.module(model, decoder.final_norm), decoder)
    classes = _SHARED
    if decoder.delta_net is not None:
        # Imports classes of vLLM that touch the GPU, which a loaded hybrid has done already.
        from jetrl_verl.rollout.delta_net import SHARED

        classes = _SHARED | SHARED
    for layer, names in decoder.named_layers(model):
        part = layer.get_submodule
        for norm in names.norms:
            _check_norm(part(norm), names)
        if names.q_norm:
            parts = (names.qkv, names.q_norm, names.k_norm, names.rotary, names.core, names.o)
            part(names.attention).parts = tuple(map(leaf, parts))
            _share(part(names.attention), classes)
        if decoder.delta_net is not None:
            layer.parts = names.input_norm, names.post_norm
            _share(layer, classes)
        if (delta := names.delta_net) is not None:
            part(delta.block).parts = tuple(map(leaf, (delta.qkvz, delta.ba, delta.out)))
            _share(part(delta.block), classes)
        if (mixture := names.experts) is not None:
            if mixture.shared_gate:
                parts = names.mlp, names.gate_up, names.activation, names.down, mixture.shared_gate
                part(mixture.block).parts = tuple(map(leaf, parts))
            _share(part(mixture.block), classes)
        for handoff in names.handoffs:
            source, reader = part(handoff.source), part(handoff.vllm_reader)
            if not isinstance(source, ReadByLinear):
                refuse("operation_replaced_in_vllm", what=f"the layer {type(source).__name__}")
            method = reader.method if isinstance(reader, SharedMixture) else getattr(reader, "quant_method", None)
            if isinstance(method, JetLinearMethod | JetExpertsMethod) and method.format.accepts_quantized:
                source.reader_format, source.reader_rule = method.format, method.config.scale_rule
                source.keeps_rows = handoff.routed

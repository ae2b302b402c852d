# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Gives single modules of a stock Hugging Face decoder another forward, which runs the shared operations.

Modules, parameters, names and checkpoints stay; residual additions and the embedding are stock BF16 on both sides. If
an FP8 linear layer alone reads what a norm or the activation writes, that operation hands over a
:class:`QuantizedTensor` (nn/handoff.py). A hook on the decoder finds where sequences begin once per pass; every layer
gets it as a keyword, and no mask is built.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from verl.utils.transformers_compat import unpack_visual_output

from jetrl_verl import formats, kernels, models
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels.recomputation import last_of_layer
from jetrl_verl.models.families.base import Experts, Family, leaf, norm_eps, read
from jetrl_verl.models.modules import check_operations_of
from jetrl_verl.nn.attention import AttentionCore
from jetrl_verl.nn.chunked_logits import KEPT_BYTES, Compute, mask_unused, per_token
from jetrl_verl.nn.gated_mlp import covers, gated_product
from jetrl_verl.nn.handoff import accept_quantized
from jetrl_verl.nn.linear import linear_in, project, quantize_input
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.train import delta_net, sequence_parallel
from jetrl_verl.train.packing import Packing

REACHES = (
    "verl.models.transformers.qwen2_vl:qwen2_vl_base_forward",
    "verl.models.transformers.qwen3_5:qwen3_5_base_forward",
    "verl.models.transformers.qwen3_vl:qwen3_vl_base_forward",
)
"""What verl puts under a model with images and this file calls; scripts/reach.py watches it."""

ATTENTION = "jetrl_shared"
"""``_attn_implementation``; transformers builds no mask for a name that its mask interface does not know."""


def _text_positions(positions: torch.Tensor) -> torch.Tensor:
    """Position ids ``[B, T]``, from those or from mRoPE's ``[3 or 4, B, T]``, whose rows are equal for text."""
    if positions.dim() == 2:
        return positions
    if not torch.equal(positions, positions[:1].expand_as(positions)):
        refuse("images", what="a sample with positions of an image or video", scope="shared operations")
    return positions[0]


def _find_sequences(
    decoder: nn.Module, inputs: tuple, arguments: dict[str, Any], *, whole: bool, images: bool
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: adds ``packing``, and ``position_ids`` if absent.

    Args:
        whole: see :func:`_slices_itself`. images: see :func:`share_operations`.
    """
    if inputs:
        raise TypeError("shared operations: call the model with keyword arguments")
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        raise ValueError("shared operations: the trainer's model does not generate; pass use_cache=False")
    tokens = arguments.get("input_ids")
    tokens = tokens if tokens is not None else arguments["inputs_embeds"][..., 0]
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    of_text = positions[0] if images and positions.dim() == 3 else _text_positions(positions)
    of_text = of_text.expand(tokens.shape[:2])
    if not images or positions.dim() == 2:
        positions = of_text
    of_all_ranks = of_text if whole else sequence_parallel.whole(of_text)
    packing = Packing.of(of_all_ranks, arguments.get("attention_mask"))
    return inputs, {
        **arguments,
        "use_cache": False,
        "attention_mask": None,
        "position_ids": positions,
        "packing": packing,
    }


def _norm_forward(
    self: nn.Module, hidden_states: torch.Tensor, *, unit_offset: bool, readers: Sequence[nn.Module] = ()
) -> torch.Tensor | QuantizedTensor:
    """Quantized if only ``readers`` read the result, and all accept it."""
    if not readers or not accept_quantized(readers):
        return kernels.rms_norm(hidden_states, self.weight, norm_eps(self), unit_offset)
    reader = readers[0]
    return reader.format.rms_norm(hidden_states, self.weight, norm_eps(self), reader.scale_rule, unit_offset)


def _mlp_forward(self: nn.Module, x: torch.Tensor | QuantizedTensor, *, family: Family) -> torch.Tensor:
    gate, up, down = (linear_in(self, leaf(name)) for name in (family.gate, family.up, family.down))
    output = partial(_last, down) if family.experts is None else down
    if accept_quantized((gate, up)):
        x = quantize_input(x, gate.format, gate.scale_rule)
        if covers(x, gate, up, down):
            return output(gated_product(x, gate, up))
    if not accept_quantized((down,)):
        return output(kernels.silu_mul(gate(x), up(x)))
    return output(down.format.silu_mul(gate(x), up(x), down.scale_rule))


def _last(module: nn.Module, *inputs: Any) -> torch.Tensor:
    """``module(*inputs)``, which the layer adds to its residual."""
    last_of_layer()
    return module(*inputs)


def _router_forward(
    self: nn.Module, hidden_states: torch.Tensor, *, mixture: Experts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP32 logits ``[T, E]``, FP32 weights ``[T, k]``, experts ``[T, k]``, as transformers returns them."""
    logits = kernels.logits(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
    experts, weights = kernels.route(logits, self.top_k, mixture.renormalizes(self))
    return logits, weights, experts


def _mixture_forward(self: nn.Module, x: torch.Tensor | QuantizedTensor, *, family: Family) -> torch.Tensor:
    mixture, quantized = family.experts, isinstance(x, QuantizedTensor)
    source = x.source if quantized else x
    rows = source.reshape(-1, source.shape[-1])
    x = x if quantized else rows
    if mixture.shared_gate:
        shared = getattr(self, leaf(family.mlp))(x).reshape(rows.shape)
        gate = kernels.logits(rows, getattr(self, leaf(mixture.shared_gate)).weight)
    _, weights, chosen = getattr(self, leaf(mixture.router))(rows)
    # After the shared expert, whose output the gradient of its gate reads.
    out = _last(getattr(self, leaf(mixture.module)), x, chosen, weights).reshape(rows.shape)
    if mixture.shared_gate:
        out = kernels.add_shared_expert(out, shared, gate)
    return out.reshape(source.shape)


def _rotary_forward(
    self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``position_embeddings`` of the layers: table ``[P, R]`` and positions ``[B * T]``, where mRoPE's rows are equal;
    with ``rows`` (``VisionFamily.position_rows``) a table of the tokens."""
    # Not a buffer, since FSDP would cast it and its dtype is part of the contract.
    self.shared_table = self.shared_table.to(x.device)
    if rows is not None and position_ids.dim() == 3:
        return kernels.table_of_tokens(self.shared_table, position_ids.flatten(1), rows.to(x.device))
    position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
    return self.shared_table, position_ids.flatten()


def _attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor | QuantizedTensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    packing: Packing,
    *,
    family: Family,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # [B * T, heads, D] each.
    q, k, v = project(
        hidden_states, [linear_in(self, leaf(name)) for name in (family.q, family.k, family.v)], self.head_dim
    )
    gate = None
    if family.gated:  # a query's head is followed by its gate
        q, gate = q.unflatten(1, (-1, 2)).unbind(2)
    if family.q_norm:
        q_norm, k_norm = getattr(self, leaf(family.q_norm)), getattr(self, leaf(family.k_norm))
        of_norm = q_norm.weight, k_norm.weight, norm_eps(q_norm)
        q, k = kernels.norm_rotary(q, k, *of_norm, *position_embeddings, family.unit_offset)
    else:
        q, k = kernels.rotary(q, k, *position_embeddings)
    sequences, heads = (packing.cu_seqlens, packing.max_seqlen), sequence_parallel.by_heads(q, k, v)
    out = sequence_parallel.by_tokens(packing.of_real(lambda *real: self.core(*real, *sequences), *heads))
    output, shape = linear_in(self, leaf(family.o)), hidden_states.shape[:-1]
    if gate is None:
        return output(out.reshape(*shape, -1)), None
    if accept_quantized((output,)):
        out = output.format.sigmoid_mul(out, gate, output.scale_rule)
    else:
        out = kernels.sigmoid_mul(out, gate)
    return output(out).view(*shape, -1), None


@dataclass
class TokenNumbers:
    """Numbers of each token that the model returns instead of logits.

    Attributes:
        names: of the numbers. rows: ``[B, S]`` bool, the tokens; None for all.
        compute: see :func:`jetrl_verl.nn.chunked_logits.per_token`.
        kept_bytes: bytes of logits kept for backward.
    """

    names: tuple[str, ...]
    rows: torch.Tensor | None
    compute: Compute
    kept_bytes: int = KEPT_BYTES


_PIXELS, _VIDEOS = "pixel_values", "pixel_values_videos"
"""Inputs of a vision tower."""


def _slices_itself(model: nn.Module) -> bool:
    """Whether verl gives the model all tokens under Ulysses, and its decoder slices them after the embedding."""
    return hasattr(model.config, "vision_config")


def _nothing_of(tower: nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    """0, from a pass of the tower over 16 empty patches: with FSDP every rank runs it if one has images, and every
    parameter has a gradient."""
    config = tower.config
    patches = embeddings.new_zeros(16, config.in_channels * config.temporal_patch_size * config.patch_size**2)
    main, others = unpack_visual_output(tower(patches, grid_thw=torch.tensor([[1, 4, 4]], device=embeddings.device)))
    return sum(features.mean() for features in (main, *(others or ()))) * 0.0


def _model_forward(
    self: nn.Module, *args: Any, token_numbers: TokenNumbers | None = None, images: bool, **inputs: Any
) -> ModelOutput:
    """The stock forward, or with ``token_numbers`` a tuple of them as ``logits``; then a vision tower runs if samples
    may have ``images``.

    The forward of ``model`` is verl's ``qwen2_vl_base_forward``, ``qwen3_vl_base_forward`` or
    ``qwen3_5_base_forward``.
    """
    if token_numbers is None:
        return type(self).forward(self, *args, **inputs)
    if _VIDEOS in inputs or (_PIXELS in inputs and not images):
        refuse("images", what="a sample with an image or video", scope="shared operations")
    if _PIXELS in inputs:
        hidden_states = self.model(*args, **inputs).last_hidden_state
    else:
        if _slices_itself(self):
            embeddings = self.get_input_embeddings()(inputs.pop("input_ids"))
            tower = models.family(self.config).tower
            inputs["inputs_embeds"] = (
                embeddings + _nothing_of(self.get_submodule(tower), embeddings) if images else embeddings
            )
        hidden_states = self.get_decoder()(*args, **inputs).last_hidden_state
    return CausalLMOutputWithPast(logits=self.get_output_embeddings()(hidden_states, token_numbers))


def _logits_forward(
    self: nn.Module, hidden_states: torch.Tensor, numbers: TokenNumbers | None = None
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if numbers is None:
        return mask_unused(kernels.logits(hidden_states, self.weight), self.used_vocabulary, self.banned_tokens)
    hidden = hidden_states.flatten(0, 1) if numbers.rows is None else hidden_states[numbers.rows]
    mask = dict(used=self.used_vocabulary, banned=self.banned_tokens)
    return per_token(hidden, self.weight, numbers.compute, **mask, kept_bytes=numbers.kept_bytes)


def _refuse_attention(*_: Any, **__: Any) -> None:
    """Attention function of ``ATTENTION`` in a model of stock modules, which verl builds to save ``hf_model``."""
    raise RuntimeError(
        "shared operations: a model built from the trainer's configuration can be saved but not run. Load the saved "
        "folder, whose configuration names no attention."
    )


def share_operations(model: nn.Module, kv_cache: str = formats.UNQUANTIZED, images: bool = False) -> dict[str, int]:
    """Put the shared operations in place.

    Args:
        model: a Hugging Face causal language model of a supported family, before FSDP wraps it.
        kv_cache: format of the rollout's cache, which attention reads keys and values through (``formats.CACHES``).
        images: whether samples may have images, so that the vision tower, which stays stock, runs in every pass.

    Returns:
        Number of modules of each kind that now run a shared operation.

    Raises:
        Unsupported: the family, the configuration or a module is not covered.
    """
    config = model.config
    family = models.family(config)
    family.check_operations(config)
    check_operations_of(model)
    head = model.get_submodule(family.head)
    counts: Counter[str] = Counter()

    def replace(kind: str, module: nn.Module, forward: Any, **settings: Any) -> None:
        # Not a bound method, which has no copy of its settings in a copied module and cannot be pickled.
        module.forward = partial(forward, module, **settings)
        counts[kind] += 1

    for layer, names in family.named_layers(model):
        part = layer.get_submodule
        readers = {handoff.source: [part(reader) for reader in handoff.readers] for handoff in names.handoffs}
        for norm in names.norms:
            replace("norm", part(norm), _norm_forward, unit_offset=names.unit_offset, readers=readers.get(norm, ()))
        first = part(names.attention)
        if names.delta_net is None:
            first.core = AttentionCore(first.scaling, formats.kv_cache(kv_cache), model.is_gradient_checkpointing)
            replace("attention", first, _attention_forward, family=names)
        else:
            replace("delta net", first, delta_net.delta_net_forward, names=names.delta_net)
            replace("linear layer", layer, delta_net.layer_forward, family=names)
        if names.has_mlp:
            replace("mlp", part(names.mlp), _mlp_forward, family=names)
        if (mixture := names.experts) is not None:
            replace("mixture", part(mixture.block), _mixture_forward, family=names)
            replace("router", part(mixture.router), _router_forward, mixture=mixture)
    replace("norm", model.get_submodule(family.final_norm), _norm_forward, unit_offset=family.unit_offset)
    rotary = model.get_submodule(family.rotary_embedding)
    width, positions = family.rotary_dim(config), read(config, "max_position_embeddings")
    rotary.shared_table = kernels.rotary_table(width, positions, read(config, "rope_parameters"))
    replace("rotary", rotary, _rotary_forward, rows=torch.tensor(family.position_rows(config)) if images else None)
    replace("logits", head, _logits_forward)
    head.used_vocabulary, head.banned_tokens = None, ()
    model.forward = partial(_model_forward, model, images=images)
    # Not with AttentionMaskInterface, which would build masks.
    AttentionInterface.register(ATTENTION, _refuse_attention)
    decoder = model.get_decoder()
    decoder.config._attn_implementation = ATTENTION  # a vision tower keeps its own
    find_sequences = partial(_find_sequences, whole=_slices_itself(model), images=images)
    decoder.register_forward_pre_hook(find_sequences, with_kwargs=True)
    return dict(counts)

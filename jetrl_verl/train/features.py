# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a feature of verl's FSDP engine is, and the small ones. engine.py lists all features in order."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name
from verl.workers.rollout.utils import get_vision_placeholder_token_ids

from jetrl_verl import formats
from jetrl_verl.algorithms.invariant_scaling import check_resumed, fold_missing, folded_in
from jetrl_verl.checkpoint import validation
from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.model import padding_words
from jetrl_verl.config.support.table import refuse
from jetrl_verl.kernels import describe_backends
from jetrl_verl.kernels.recomputation import layer_contexts
from jetrl_verl.metrics import hooks
from jetrl_verl.metrics.quantization import QuantizationMetrics
from jetrl_verl.models import family
from jetrl_verl.nn.checkpointing import Room, checkpoint
from jetrl_verl.nn.chunked_logits import mask_unused_vocabulary
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.sync.finite import refuse_to_save_non_finite

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

REACHES = (
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.module",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.rank",
)
"""What this file uses of verl through values; scripts/reach.py watches it."""

_UNKEPT_SCALES = (
    "jetrl: the checkpoint %s has no scales of weights (its run had no jetrl.int8_scales=first, or an older version); "
    "this run computes them at its first weight sync and keeps those"
)


class Feature:
    """One feature of one engine.

    Any other method of a feature has the name of a method of verl's engine and wraps it: its first argument ``stock``
    is verl's method, wrapped by the features further down the list; the other arguments are those of the call.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.config: JetFSDPEngineConfig = engine.engine_config
        self.options = self.config.jetrl.options

    def install(self, module: torch.nn.Module) -> None:
        """Change the Hugging Face model before FSDP wraps it."""


def from_rank_0(value: Any) -> Any:
    """Rank 0's ``value`` on every rank, since its files may be on no other machine. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class ValidatedCheckpoints(Feature):
    """Files are validated before a load; a save refuses NaN and Inf, and names the space left if a write fails."""

    def load_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        validation.check_checkpoint(local_path, self.engine.rank, torch.distributed.get_world_size())
        check_resumed(local_path, folded_in(self.engine.module.config))
        stock(local_path, *args, **kwargs)

    def save_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        refuse_to_save_non_finite(self.engine.module)
        with validation.explained(local_path):
            stock(local_path, *args, **kwargs)
            validation.drop_other_world_sizes(local_path, torch.distributed.get_world_size())


class FrozenTower(Feature):
    """A vision tower, which text does not use, keeps its weights: weight decay alone would move them."""

    def install(self, module: torch.nn.Module) -> None:
        if not (name := family(module.config).tower):
            return
        tower = module.get_submodule(name).requires_grad_(False)
        if self.config.strategy == "fsdp":
            # A vector of its own: FSDP1 flattens no trained parameters together with frozen ones.
            module._no_split_modules = {*module._no_split_modules, type(tower).__name__}


class InvariantScaling(Feature):
    """QuRL's factor in the actor's weights."""

    def install(self, module: torch.nn.Module) -> None:
        fold_missing(module, self.options.invariant_scaling)


class QuantizedLinears(Feature):
    """Linear layers and experts in the FP8 flow."""

    def install(self, module: torch.nn.Module) -> None:
        rule, backward = self.options.scale_rule, self.options.backward
        names = replace_linears(module, self.engine.jetrl_plans, scale_rule=rule, backward=backward)
        if self.engine.rank == 0:
            layers = f"{len(names)} linear layers of the {self.config.jetrl_role}"
            backends = describe_backends(get_device_name())
            logger.info(f"jetrl: {layers} quantized (scale rule {rule}, backward {backward}); backends {backends}")

    def forward_backward_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Frees cached qdata at the end."""
        try:
            return stock(*args, **kwargs)
        finally:
            # FSDP1 reshards without assigning attributes, so qdata would stay while the rollout runs.
            for module in self.engine.module.modules():
                if isinstance(module, JetLinear | JetExperts):
                    module.drop_qdata()


class Checkpointing(Feature):
    """What decoder layers keep for their recomputation: results under ``selective``, and under ``auto`` while a GPU has
    :class:`Room`."""

    room: Room | None = None

    def install(self, module: torch.nn.Module) -> None:
        if not module.is_gradient_checkpointing or self.engine.model_config.enable_activation_offload:
            return  # verl's offload recomputes layers in a way of its own
        if self.options.checkpointing == "auto" and get_device_name() == "cuda":
            self.room = Room()
            checkpoint(module, self.room.contexts)
        else:
            checkpoint(module, partial(layer_contexts, self.options.checkpointing == "selective"))

    def prepare_model_inputs(self, stock: Any, micro_batch: Any) -> tuple[dict, dict]:
        """verl's, right before the forward of a micro-batch."""
        inputs, output_args = stock(micro_batch)
        if self.room is not None and torch.is_grad_enabled():
            gradients = any(parameter.grad is not None for parameter in self.engine.module.parameters())
            self.room.start(inputs["input_ids"].numel(), gradients)
        return inputs, output_args

    def forward_backward_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Ends the last pass before the optimizer needs memory."""
        outputs = stock(*args, **kwargs)
        if self.room is not None:
            self.room.end()
        return outputs

    def train_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = stock(*args, **kwargs)
        if self.room is not None:
            outputs["metrics"]["actor/jetrl/layers_kept"] = [sum(self.room.layers) / len(self.room.layers)]
            self.room.layers.clear()
        return outputs


class MaskedVocabulary(Feature):
    """What verl masks in the rollout has no probability here either: vocabulary entries without a token, and the
    placeholders of images and videos where the model has a processor."""

    def install(self, module: torch.nn.Module) -> None:
        model, head = self.engine.model_config, module.get_output_embeddings()
        if model.tokenizer is None or head is None:
            return
        entries, banned = head.weight.shape[0], get_vision_placeholder_token_ids(model.processor)
        used = min(len(model.tokenizer), entries)
        if used == entries and not banned:
            return
        if model.use_fused_kernels:
            # The driver refuses this for a model that it can read (config/model.py).
            masked = entries - used + len(banned)
            refuse("fused_kernels_of_a_padded_vocabulary", **padding_words(masked, model.path))
        mask_unused_vocabulary(module, used, banned)


class KeptScales(Feature):
    """Under ``jetrl.int8_scales=first`` the scales of the run's first sync, the same on every rank.

    Attributes:
        scales: name of a weight -> its scales; filled by the first sync.
    """

    def install(self, module: torch.nn.Module) -> None:
        self.scales: dict[str, torch.Tensor] = {}

    def load_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        file = Path(local_path) / validation.KEPT_SCALES
        rank_0 = self.engine.rank == 0
        saved = from_rank_0(torch.load(file, map_location="cpu") if rank_0 and file.exists() else None)
        if saved is None and rank_0:
            logger.warning(_UNKEPT_SCALES, file.parent)
        self.scales = {name: scales.to(get_device_id()) for name, scales in (saved or {}).items()}
        stock(local_path, *args, **kwargs)

    def save_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        stock(local_path, *args, **kwargs)
        if self.scales and self.engine.rank == 0:
            torch.save(self.scales, Path(local_path) / validation.KEPT_SCALES)


class Metrics(Feature):
    """The actor's metrics: clipped tokens, and what quantization does to its tensors.

    Attributes:
        quantization: None if the rollout quantizes neither weights nor cache.
    """

    quantization: QuantizationMetrics | None = None

    def install(self, module: torch.nn.Module) -> None:
        hooks.install_in_actor()
        options, traits = self.options, formats.traits_of(self.options.rollout)
        measured = traits is not None and traits.measured
        # The cache of a BF16 rollout may be quantized, too.
        if measured or (self.config.shared_operations and formats.cache_traits(options.kv_cache).quantized):
            number_format = formats.get(options.rollout) if measured else None
            self.quantization = QuantizationMetrics(module, self.engine.jetrl_plans, options.scale_rule, number_format)

    def train_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        if self.quantization is None:
            return stock(*args, **kwargs)
        measured: dict[str, list[float]] = {}
        with self.quantization.measuring(measured):
            outputs = stock(*args, **kwargs)
        outputs["metrics"].update(measured)
        return outputs

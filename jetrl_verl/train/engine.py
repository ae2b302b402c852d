# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine with the features of a precision; an engine without our config behaves as verl's.

Registered for (device, vendor), which verl looks up before device alone, when a precision's engine config is first
built in a process (targets/configs.py).
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.support.table import explained
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.train.adapters import MergedAdapters
from jetrl_verl.train.features import (
    Checkpointing,
    Feature,
    FrozenTower,
    InvariantScaling,
    KeptScales,
    MaskedVocabulary,
    Metrics,
    QuantizedLinears,
    ValidatedCheckpoints,
)
from jetrl_verl.train.gathered import GatheredOnce
from jetrl_verl.train.shadow import CalibratedClipping
from jetrl_verl.train.token_numbers import SharedOperations
from jetrl_verl.train.tripwire import Tripwire
from jetrl_verl.train.weight_sync import WeightSync


def features_of(config: JetFSDPEngineConfig) -> list[type[Feature]]:
    """The features of a model with this engine config.

    They are installed in this order; of two that wrap a method of verl's engine, the first one is outside.
    """
    actor, options = config.jetrl_role == "actor", config.jetrl.options
    table = (
        (ValidatedCheckpoints, True),  # around what other features load and save
        (Tripwire, actor and config.jetrl.exact),  # raises after every other feature has ended its part of a pass
        (FrozenTower, actor and not config.jetrl.images),
        (InvariantScaling, actor),  # changes weights, so before any feature reads them
        (QuantizedLinears, config.quantized_linears),  # frees qdata after a pass, when GatheredOnce has resharded
        (MergedAdapters, config.quantized_linears or config.shared_operations),
        (GatheredOnce, options.gathered == "batch"),
        (SharedOperations, config.shared_operations),  # its norms hand over to the linears of QuantizedLinears
        (Checkpointing, config.shared_operations),  # of layers that have them
        (MaskedVocabulary, config.jetrl_role != "critic"),  # in the lm_head of SharedOperations, if there is one
        (KeptScales, actor and options.int8_scales == "first"),
        (WeightSync, actor),
        (Metrics, actor and options.metrics),  # samples modules installed above; around CalibratedClipping's forwards
        (CalibratedClipping, actor and options.clip == "calibrated"),
    )
    return [feature for feature, applies in table if applies]


def _wrapped(name: str) -> Callable:
    """A method of the engine: verl's of that name, inside those of the features."""

    def method(self: "_JetEngine", *args: Any, **kwargs: Any) -> Any:
        call = getattr(super(_JetEngine, self), name)
        for feature in reversed(self._features):
            if (wrapper := getattr(feature, name, None)) is not None:
                call = partial(wrapper, call)
        return call(*args, **kwargs)

    return method


class _JetEngine:
    """Mixin of verl's policy and value engines: lets the features wrap verl's methods."""

    _features: tuple[Feature, ...] = ()

    def feature(self, kind: type[Feature]) -> Any:
        """The feature of this engine; None if it does not apply."""
        return next((feature for feature in self._features if isinstance(feature, kind)), None)

    @cached_property
    def jetrl_plans(self) -> dict[str, LinearPlan]:
        """Which linear layers of this model are quantized, and in which format; see ``Job.plans``."""
        return self.engine_config.jetrl.plans(self.model_config.hf_config, self.engine_config.jetrl_role)

    def _build_module(self) -> torch.nn.Module:
        module, config = super()._build_module(), self.engine_config
        if isinstance(config, JetFSDPEngineConfig):
            self._features = tuple(feature(self) for feature in features_of(config))
            # The driver has checked every model but a hub name without a network.
            with explained(self.model_config.path, config.jetrl.options.precision):
                for feature in self._features:
                    feature.install(module)
        return module

    _build_lora_module = _wrapped("_build_lora_module")
    forward_backward_batch = _wrapped("forward_backward_batch")
    infer_batch = _wrapped("infer_batch")
    train_batch = _wrapped("train_batch")
    prepare_model_inputs = _wrapped("prepare_model_inputs")
    prepare_model_outputs = _wrapped("prepare_model_outputs")
    get_per_tensor_param = _wrapped("get_per_tensor_param")
    load_checkpoint = _wrapped("load_checkpoint")
    save_checkpoint = _wrapped("save_checkpoint")


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngine(_JetEngine, FSDPEngineWithLMHead):
    """Policy (actor or reference) under FSDP1 or FSDP2."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngineWithValueHead(_JetEngine, FSDPEngineWithValueHead):
    """Critic under FSDP1 or FSDP2."""

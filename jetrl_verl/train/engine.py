# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine with the features of a precision; an engine without our config behaves as verl's.

Registered for (device, vendor), which verl looks up before device alone, when a precision's engine config is first
built in a process (targets/configs.py).
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.config.support.table import explained
from jetrl_verl.models.plan import LinearPlan
from jetrl_verl.patches import weight_sync
from jetrl_verl.train.checkpoints import InvariantScaling, KeptScales, ValidatedCheckpoints
from jetrl_verl.train.feature import Feature
from jetrl_verl.train.gathered import GatheredOnce
from jetrl_verl.train.metrics import Metrics
from jetrl_verl.train.quantized_linears import QuantizedLinears
from jetrl_verl.train.shadow import CalibratedClipping
from jetrl_verl.train.token_numbers import SharedOperations
from jetrl_verl.train.vocabulary import MaskedVocabulary
from jetrl_verl.train.weight_sync import WeightSync

FEATURES: tuple[type[Feature], ...] = (
    ValidatedCheckpoints,  # around what other features load and save
    InvariantScaling,  # changes weights, so before any feature reads them
    QuantizedLinears,  # frees qdata after a pass, when GatheredOnce has resharded
    GatheredOnce,
    SharedOperations,  # its norms hand over to the linears of QuantizedLinears
    MaskedVocabulary,  # in the lm_head of SharedOperations, if there is one
    KeptScales,
    WeightSync,
    Metrics,  # samples the linears and the attention installed above; around CalibratedClipping's forwards
    CalibratedClipping,
)
"""All features. They are installed in this order; of two that wrap a method, the first one is outside."""

FeatureT = TypeVar("FeatureT", bound=Feature)


class _JetEngine:
    """Mixin of verl's policy and value engines: lets the features wrap verl's methods."""

    _features: tuple[Feature, ...] = ()

    def feature(self, kind: type[FeatureT]) -> FeatureT | None:
        """The feature of this engine; None if it does not apply."""
        return next((feature for feature in self._features if isinstance(feature, kind)), None)

    @cached_property
    def jetrl_plans(self) -> dict[str, LinearPlan]:
        """Which linear layers are quantized: an actor's in the rollout's format, others' in the flow's."""
        return self.engine_config.jetrl.plans(self.model_config.hf_config, self.engine_config.jetrl_role)

    def _build_module(self) -> torch.nn.Module:
        module, config = super()._build_module(), self.engine_config
        if isinstance(config, JetFSDPEngineConfig):
            self._features = tuple(feature(self) for feature in FEATURES if feature.applies(config))
            # The driver has checked every model but a hub name without a network.
            with explained(self.model_config.path, config.jetrl.options.precision):
                for feature in self._features:
                    feature.install(module)
        return module

    def _wrapped(self, name: str) -> Callable:
        """verl's method of that name inside those of the features."""
        method = getattr(super(), name)
        for feature in reversed(self._features):
            if (wrapper := getattr(feature, name, None)) is not None:
                method = partial(wrapper, method)
        return method

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped("forward_backward_batch")(*args, **kwargs)

    def infer_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped("infer_batch")(*args, **kwargs)

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped("train_batch")(*args, **kwargs)

    def prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[dict, dict]:
        return self._wrapped("prepare_model_inputs")(*args, **kwargs)

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped("prepare_model_outputs")(*args, **kwargs)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped("get_per_tensor_param")(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped("load_checkpoint")(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped("save_checkpoint")(*args, **kwargs)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngine(_JetEngine, FSDPEngineWithLMHead):
    """Policy (actor or reference) under FSDP1 or FSDP2."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class JetFSDPEngineWithValueHead(_JetEngine, FSDPEngineWithValueHead):
    """Critic under FSDP1 or FSDP2."""


weight_sync.TIME_LIMIT.apply()

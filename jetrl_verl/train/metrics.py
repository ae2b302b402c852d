# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The actor's metrics: clipped tokens, and what quantization does to its tensors."""

from typing import Any

import torch

from jetrl_verl import formats
from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.metrics import hooks
from jetrl_verl.metrics.quantization import QuantizationMetrics
from jetrl_verl.train.feature import Feature


class Metrics(Feature):
    """Attributes:
    quantization: None if the rollout quantizes neither weights nor cache.
    """

    quantization: QuantizationMetrics | None = None

    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        return config.jetrl_role == "actor" and config.jetrl.options.metrics

    def install(self, module: torch.nn.Module) -> None:
        hooks.install_in_actor()
        options = self.options
        traits = formats.traits_of(options.rollout)
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

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The model's linear layers and experts in the FP8 flow."""

from typing import Any

import torch
from verl.utils.device import get_device_name

from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.kernels import describe_backends
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.nn.replace import replace_linears
from jetrl_verl.train.feature import Feature, logger

REACHES = (
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.module",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.rank",
)
"""What this file uses of verl through values; scripts/reach.py watches it."""


class QuantizedLinears(Feature):
    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        return config.quantized_linears

    def install(self, module: torch.nn.Module) -> None:
        rule, backward = self.options.scale_rule, self.options.backward
        names = replace_linears(module, self.engine.jetrl_plans, scale_rule=rule, backward=backward)
        if self.engine.rank == 0:
            logger.info(
                "jetrl: %d linear layers of the %s quantized (scale rule %s, backward %s); backends %s",
                len(names),
                self.config.jetrl_role,
                rule,
                backward,
                describe_backends(get_device_name()),
            )

    def forward_backward_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Frees cached qdata at the end."""
        try:
            return stock(*args, **kwargs)
        finally:
            # FSDP1 reshards without assigning attributes, so qdata would stay while the rollout runs.
            for module in self.engine.module.modules():
                if isinstance(module, JetLinear | JetExperts):
                    module.drop_qdata()

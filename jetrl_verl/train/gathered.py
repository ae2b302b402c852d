# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 weights that stay gathered for all micro-batches of a batch (``jetrl.gathered=batch``).

Weights do not change between two optimizer steps, so each is gathered and quantized once instead of twice per
micro-batch; qdata and transposes stay with them (nn/weight_cache.py). No bit of a result changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from jetrl_verl.train.features import Feature, logger

_FREES_EACH_PASS = (
    "jetrl: jetrl.gathered=batch has no effect on the %s, whose FSDP1 reshards after every forward and backward. "
    "Set %s.strategy=fsdp2."
)


class GatheredOnce(Feature):
    def install(self, module: torch.nn.Module) -> None:
        if self.config.strategy != "fsdp2" and self.engine.rank == 0:
            # The critic alone: verl's default for it is FSDP1, also in jobs without one, so the driver cannot warn.
            logger.warning(_FREES_EACH_PASS, self.config.jetrl_role, self.config.jetrl_role)

    def forward_backward_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.strategy != "fsdp2":
            return stock(*args, **kwargs)
        with gathered_once(self.engine.module, self.config.reshard_after_forward):
            return stock(*args, **kwargs)


@contextmanager
def gathered_once(model: torch.nn.Module, after_forward: bool) -> Iterator[None]:
    """Inside the block gathered weights stay for the next pass; afterwards all are sharded.

    Args:
        model: under FSDP2. after_forward: whether its modules otherwise reshard after their forward.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            # After a forward that raised, a unit reshards only if it would after a forward.
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            unit.set_reshard_after_forward(after_forward, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 weights that stay gathered for all micro-batches of a batch (``jetrl.gathered=batch``).

Weights do not change between two optimizer steps, so each is gathered and quantized once instead of twice per
micro-batch; qdata and transposes stay with them (nn/weight_cache.py). No bit of a result changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule


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

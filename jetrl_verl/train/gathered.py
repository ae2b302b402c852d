# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that FSDP2 gathers once for all micro-batches of a batch (``jetrl.gathered=batch``).

FSDP frees a layer's gathered weights behind each of its passes, so each micro-batch gathers all of them twice, and its
layers quantize them twice. Between two optimizer steps they are the same weights: where the memory is there, they may
stay, and with them their qdata and transposes (nn/weight_cache.py). Not a bit of a result depends on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gathered_once(model: torch.nn.Module, after_forward: bool) -> Iterator[None]:
    """Inside, what a pass of ``model`` gathers stays in place for the next one; behind it all is sharded.

    Args:
        model: under FSDP2. after_forward: whether its modules are otherwise resharded behind their forward.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            # A unit whose forward has raised reshards only if it would behind that forward.
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            unit.set_reshard_after_forward(after_forward, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)

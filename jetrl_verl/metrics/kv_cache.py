# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a quantized KV cache's rounding, by layer, from a sample of the trainer's keys and values.

The trainer quantizes one head of one token at a time, as the rollout's cache does, so 128 tokens of the first
micro-batch give the very data in the cache. ``saturated`` is the share of non-zero elements clipped at 448 times the
scale; with scales from the head's own maximum it is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from jetrl_verl.metrics.sample import sampled_layers, sampled_rows, shares, tally
from jetrl_verl.models.families.base import place
from jetrl_verl.nn.attention import AttentionCore

KIND = "kv_cache"
SAMPLED_TOKENS = 128


class KVCacheSampler:
    """Measures a sample of a model's keys and values while it runs.

    Args:
        model: the trainer's model; without shared operations or with a BF16 cache there are no metrics.
    """

    def __init__(self, model: nn.Module) -> None:
        cores = {
            place(name).index: module
            for name, module in model.named_modules()
            if isinstance(module, AttentionCore) and module.kv_cache.traits.quantized
        }
        self._cores = {index: cores[index] for index in sampled_layers(cores)}
        self._passes = 0
        self._tallies: dict[tuple[str, int], torch.Tensor] = {}

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measure the first call of each chosen layer inside the block."""
        self._tallies.clear()
        self._passes += 1
        hooks = [core.register_forward_pre_hook(partial(self._forward, index)) for index, core in self._cores.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _forward(self, index: int, core: nn.Module, operands: tuple) -> None:
        k, v = operands[1:3]
        # Activation checkpointing calls a layer twice, and a pass has many micro-batches.
        if torch.compiler.is_compiling() or k.numel() == 0 or ("K", index) in self._tallies:
            return
        k, v = (sampled_rows(heads.detach(), self._passes, SAMPLED_TOKENS) for heads in (k, v))
        for heads in core.kv_cache.stored(k, v):
            sums = tally(core.kv_cache, heads.values, heads.qdata, heads.restored)
            self._tallies[heads.tensor, index] = torch.cat([sums, core.kv_cache.saturated(heads)[None]])

    def metrics(self) -> dict[str, float]:
        """``kv_cache/{K,V}/{underflow,subnormal,saturated,snr_db}`` over the sampled layers, and of each layer
        ``kv_cache/{K,V}/layer_<i>/...``. Waits for the device once."""
        if not self._tallies:
            return {}
        keys = list(self._tallies)
        # To the host at once; the rest is arithmetic on a few FP64 sums.
        sums = dict(zip(keys, torch.stack([self._tallies[key] for key in keys]).cpu(), strict=True))
        by_name: dict[str, torch.Tensor] = {}
        for (tensor, index), values in sums.items():
            by_name[f"{tensor}/layer_{index}"] = values
            by_name[tensor] = by_name.get(tensor, 0) + values
        return shares({(KIND, name): values[:5] for name, values in by_name.items()}) | {
            f"{KIND}/{name}/saturated": (values[5] / values[0]).item()
            for name, values in by_name.items()
            if values[0] > 0
        }

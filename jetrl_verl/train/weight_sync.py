# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The actor's weight sync (sync/wire.py), and its size and duration among the metrics."""

from functools import partial
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys

from jetrl_verl.models import family
from jetrl_verl.sync.quantize import format_of
from jetrl_verl.sync.wire import SyncStatistics
from jetrl_verl.train.features import Feature, KeptScales, Metrics
from jetrl_verl.train.flat_gather import FlatGather
from jetrl_verl.train.gather import Gather
from jetrl_verl.train.weight_stream import stated_constants, weight_stream


class WeightSync(Feature):
    _flat: FlatGather | None = None
    """Under FSDP1, made at the first sync from the wrapped module."""

    def install(self, module: torch.nn.Module) -> None:
        self._statistics = SyncStatistics()
        self._constants = stated_constants(module)
        # vLLM reads from the same field whether the head is the embedding.
        config = self.engine.model_config.hf_config
        self._tied, self._variant = bool(config.tie_word_embeddings), family(config).variant(config)
        self._gather = Gather(partial(format_of, self.engine.jetrl_plans), self._tied)
        tower = family(module.config).tower
        # Of text alone the rollout has no tower.
        self._unsent = (f"{tower}.",) if tower and not self.config.jetrl.images else ()

    def get_per_tensor_param(self, stock: Any, **kwargs: Any) -> tuple[Any, None]:
        """Stream of the weight sync (sync/wire.py)."""
        module, plans = self.engine.module, self.engine.jetrl_plans
        self._statistics = SyncStatistics()
        device = torch.device(get_device_name())
        # As verl's own stream, without adapters, which are not supported.
        if fsdp_version(module) == 2:
            params = convert_weight_keys(module.state_dict(keep_vars=True), module)
            params = {name: param for name, param in params.items() if not name.startswith(self._unsent)}
            gather = self._gather
            weights = gather.stream(params, device, self._statistics)
        else:
            gather = self._flat_gather()
            weights = gather.stream(device, self._statistics)
        kept, metrics = self.engine.feature(KeptScales), self.engine.feature(Metrics)
        stream = weight_stream(
            weights,
            self.options,
            plans,
            device,
            self._statistics,
            kept.scales if kept is not None else None,
            metrics.quantization if metrics is not None else None,
            ranks=self.config.jetrl.rollout_ranks,
            bucket_bytes=self.config.jetrl.bucket_megabytes * 2**20,
            constants=self._constants,
            tied=gather.tied,
            variant=self._variant,
        )
        return stream, None

    def _flat_gather(self) -> FlatGather:
        if self._flat is None:
            module = self.engine.module

            def sent_as(name: str) -> str:
                sent = next(iter(convert_weight_keys({name: None}, module.module)))
                return "" if sent.startswith(self._unsent) else sent

            alike = partial(format_of, self.engine.jetrl_plans)
            self._flat = FlatGather(module, alike, self._tied, sent_as)
        return self._flat

    def train_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the last weight sync's size and duration to the metrics."""
        outputs, sync = stock(*args, **kwargs), self._statistics
        if sync.bytes:
            outputs["metrics"]["jetrl/sync_megabytes"] = [sync.bytes / 2**20]
            outputs["metrics"]["jetrl/sync_stock_megabytes"] = [sync.stock_bytes / 2**20]
            outputs["metrics"]["jetrl/sync_seconds"] = [sync.seconds]
        return outputs

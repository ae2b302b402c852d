# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The actor's weight sync (sync/wire.py), and its size and duration among the metrics."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys

from jetrl_verl.models import family
from jetrl_verl.models.adapters import ADAPTER, adapted_linears, is_factor, stock_name
from jetrl_verl.sync.quantize import format_of, quantize_stream
from jetrl_verl.sync.stacks import Name, parts_of
from jetrl_verl.sync.wire import SyncStatistics, packed
from jetrl_verl.train.adapters import with_adapters
from jetrl_verl.train.features import Feature, KeptScales, Metrics
from jetrl_verl.train.flat_gather import FlatGather
from jetrl_verl.train.gather import Gather
from jetrl_verl.train.weight_stream import stated_constants, statement_of, sync_parts


class WeightSync(Feature):
    _flat: tuple[FlatGather, FlatGather | None] | None = None
    """Under FSDP1, made at the first sync from the wrapped module: of the weights, and of the adapters' factors."""

    def install(self, module: torch.nn.Module) -> None:
        self._statistics = SyncStatistics()
        self._constants = stated_constants(module)
        # vLLM reads from the same field whether the head is the embedding.
        config = self.engine.model_config.hf_config
        self._tied, self._variant = bool(config.tie_word_embeddings), family(config).variant(config)
        self._gather, self._factors = Gather(partial(format_of, self.engine.jetrl_plans), self._tied), Gather()
        self.scales: dict[str, float] = {}
        """Name of a weight with an adapter -> the scale of its term."""
        tower = family(module.config).tower
        # Of text alone the rollout has no tower.
        self._unsent = (f"{tower}.",) if tower and not self.config.jetrl.images else ()

    def _build_lora_module(self, stock: Any, module: torch.nn.Module) -> torch.nn.Module:
        model = stock(module)
        scales = {stock_name(f"{name}.weight"): layer.scaling[ADAPTER] for name, layer in adapted_linears(model)}
        self.scales = convert_weight_keys(scales, model)
        return model

    def get_per_tensor_param(self, stock: Any, **kwargs: Any) -> tuple[Any, None]:
        """Stream of the weight sync (sync/wire.py), with merged adapters; its keywords choose among verl's ways."""
        self._statistics = SyncStatistics()
        device = torch.device(get_device_name())
        weights, tied = self._weights(device)
        kept, metrics = self.engine.feature(KeptScales), self.engine.feature(Metrics)
        options, plans, job = self.options, self.engine.jetrl_plans, self.config.jetrl
        facts = dict(constants=self._constants, tied=tied, variant=self._variant)
        statement = statement_of(options, plans, device, ranks=job.rollout_ranks, **facts)
        quantized = quantize_stream(weights, plans, options.scale_rule, kept.scales if kept is not None else None)
        parts = sync_parts(quantized, statement, metrics.quantization if metrics is not None else None)
        return packed(parts, self._statistics, job.bucket_megabytes * 2**20), None

    def save_merged(self, folder: Path) -> None:
        """Write the weights of a model with adapters, BF16 and merged, where its ``config.json`` lies. Collective."""
        weights, _ = self._weights(torch.device(get_device_name()))
        tensors = {name: part.to("cpu", copy=True) for item, stack in weights for name, part in parts_of(item, stack)}
        if self.engine.rank == 0:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()

    def _weights(self, device: torch.device) -> tuple[Iterable[tuple[Name, torch.Tensor]], Mapping[str, str]]:
        """Whole weights as the forward multiplies with them, and the names that are left out as tied."""
        module = self.engine.module
        if fsdp_version(module) == 2:
            state = {stock_name(name): param for name, param in module.state_dict(keep_vars=True).items()}
            params = convert_weight_keys(state, module)
            params = {name: param for name, param in params.items() if not name.startswith(self._unsent)}
            factors = {name: params.pop(name) for name in list(params) if is_factor(name)}
            gather = self._gather
            weights = gather.stream(params, device, self._statistics)
            of_factors = self._factors.stream(factors, device, self._statistics)
        else:
            gather, factors = self._flat_gathers()
            weights = gather.stream(device, self._statistics)
            of_factors = factors.stream(device, self._statistics) if factors is not None else ()
        return with_adapters(weights, of_factors, self.scales) if self.scales else weights, gather.tied

    def _flat_gathers(self) -> tuple[FlatGather, FlatGather | None]:
        if self._flat is None:
            module = self.engine.module

            def sent_as(name: str, factors: bool) -> str:
                sent = next(iter(convert_weight_keys({stock_name(name): None}, module.module)))
                return "" if sent.startswith(self._unsent) or is_factor(sent) != factors else sent

            alike = partial(format_of, self.engine.jetrl_plans)
            weights = FlatGather(module, alike, self._tied, partial(sent_as, factors=False))
            factors = FlatGather(module, sent_as=partial(sent_as, factors=True)) if self.scales else None
            self._flat = weights, factors
        return self._flat

    def train_batch(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the last weight sync's size and duration to the metrics."""
        outputs, sync = stock(*args, **kwargs), self._statistics
        if sync.bytes:
            outputs["metrics"]["jetrl/sync_megabytes"] = [sync.bytes / 2**20]
            outputs["metrics"]["jetrl/sync_stock_megabytes"] = [sync.stock_bytes / 2**20]
            outputs["metrics"]["jetrl/sync_seconds"] = [sync.seconds]
        return outputs

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the engine checks of a checkpoint and keeps in it: QuRL's factor, and the scales of INT8 weights."""

from pathlib import Path
from typing import Any

import torch
from verl.utils.device import get_device_id

from jetrl_verl.algorithms.invariant_scaling import check_resumed, fold_missing, folded_in
from jetrl_verl.checkpoint import validation
from jetrl_verl.config.engine_config import JetFSDPEngineConfig
from jetrl_verl.sync.finite import refuse_to_save_non_finite
from jetrl_verl.train.feature import Feature, from_rank_0, logger

_UNKEPT_SCALES = (
    "jetrl: the checkpoint %s has no scales of weights (its run had no jetrl.int8_scales=first, or an older version); "
    "this run computes them at its first weight sync and keeps those"
)


class ValidatedCheckpoints(Feature):
    """Files are validated before a load; a save refuses NaN and Inf, and names the space left if a write fails."""

    def load_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        validation.check_checkpoint(local_path, self.engine.rank, torch.distributed.get_world_size())
        check_resumed(local_path, folded_in(self.engine.module.config))
        stock(local_path, *args, **kwargs)

    def save_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        refuse_to_save_non_finite(self.engine.module)
        with validation.explained(local_path):
            stock(local_path, *args, **kwargs)
            validation.drop_other_world_sizes(local_path, torch.distributed.get_world_size())


class InvariantScaling(Feature):
    """QuRL's factor in the actor's weights."""

    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        return config.jetrl_role == "actor"

    def install(self, module: torch.nn.Module) -> None:
        fold_missing(module, self.options.invariant_scaling)


class KeptScales(Feature):
    """Under ``jetrl.int8_scales=first`` the scales of the run's first sync, the same on every rank.

    Attributes:
        scales: name of a weight -> its scales; filled by the first sync.
    """

    scales: dict[str, torch.Tensor]

    @classmethod
    def applies(cls, config: JetFSDPEngineConfig) -> bool:
        return config.jetrl_role == "actor" and config.jetrl.options.int8_scales == "first"

    def install(self, module: torch.nn.Module) -> None:
        self.scales = {}

    def load_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        file = Path(local_path) / validation.KEPT_SCALES
        rank_0 = self.engine.rank == 0
        saved = from_rank_0(torch.load(file, map_location="cpu") if rank_0 and file.exists() else None)
        if saved is None and rank_0:
            logger.warning(_UNKEPT_SCALES, file.parent)
        self.scales = {name: scales.to(get_device_id()) for name, scales in (saved or {}).items()}
        stock(local_path, *args, **kwargs)

    def save_checkpoint(self, stock: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        stock(local_path, *args, **kwargs)
        if self.scales and self.engine.rank == 0:
            torch.save(self.scales, Path(local_path) / validation.KEPT_SCALES)

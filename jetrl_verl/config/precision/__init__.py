# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the YAML of the Hydra group ``precision`` says, for those who compare a composed config with it."""

from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf


@cache
def _values(file: Path) -> DictConfig:
    return OmegaConf.load(file)


def target_of(node: str, precision: str = "") -> str:
    """``_target_`` of the node at a dotted path, in a precision's own file or in what all precisions begin with."""
    folder = Path(__file__).parent
    file = folder / f"{precision}.yaml" if precision else folder.with_name("jetrl.yaml")
    return OmegaConf.select(_values(file), f"{node}._target_", throw_on_missing=True)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the YAML of the Hydra group ``precision`` says, for those who compare a composed config with it."""

from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf


@cache
def group_values(precision: str) -> DictConfig:
    """Contents of ``<precision>.yaml``, without what its defaults bring."""
    return OmegaConf.load(Path(__file__).with_name(f"{precision}.yaml"))


def target_of(node: str, precision: str = "fp8_rollout") -> str:
    """``_target_`` that a precision gives to the node at a dotted path."""
    return OmegaConf.select(group_values(precision), f"{node}._target_", throw_on_missing=True)

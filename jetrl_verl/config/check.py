# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a precision does not support, found in the composed config alone: no file, no GPU and no import of verl.

The rules are rows of ``support/``. The check runs at every composition, so the user reads a refusal at
the command line, also under ``--cfg job``. What depends on the machine is in ``environment``.
"""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from .options import JetConfig, UnsupportedConfiguration
from .support.row import Get
from .support.scopes import VLLM
from .support.table import refusals
from .vllm_arguments import quantization_arguments


def check_config(config: DictConfig) -> None:
    """Raise ``UnsupportedConfiguration`` if a composed config cannot run under its ``jetrl`` node.

    A config without that node (``precision=bf16``, or stock verl) passes: it is verl's alone.
    """
    if OmegaConf.select(config, "jetrl") is None:
        return
    options = JetConfig.from_node(config.jetrl)
    get = reader(config)
    for refusal in refusals(get):
        raise UnsupportedConfiguration(refusal)
    quantization_arguments(options, get(VLLM))


def reader(config: DictConfig) -> Get:
    """Callable that reads a composed config."""

    def get(key: str) -> Any:
        """Value at a dotted path as plain Python; ``None`` where a part is absent or still ``???``."""
        value = OmegaConf.select(config, key)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value

    return get

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses what the composed config alone shows, at the command line, also under ``--cfg job``; the rows are in
``support/``. What depends on the machine is in ``environment``.
"""

import json
from collections.abc import Mapping
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
    """Callable that reads a composed config; an argument of vLLM given as JSON is read like the mapping."""

    def get(key: str) -> Any:
        """Value at a dotted path as plain Python; ``None`` where a part is absent or still ``???``."""
        if not f"{key}.".startswith(f"{VLLM}."):
            return _plain(OmegaConf.select(config, key))
        arguments = _plain(OmegaConf.select(config, VLLM))
        value = None
        if isinstance(arguments, Mapping):
            value = {name: _parsed(argument) for name, argument in arguments.items()}
        for name in filter(None, key.removeprefix(VLLM).split(".")):
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value == "???" else value

    return get


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _parsed(argument: Any) -> Any:
    """The mapping or list that an argument is the JSON of, else the argument."""
    if isinstance(argument, str) and argument.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(argument)
        except ValueError:
            pass
    return argument

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a precision does not support, found in the composed config alone: no file, no GPU and no import of verl.

The rules are rows of ``support/``. The check runs at every composition, so the user reads a refusal at
the command line, also under ``--cfg job``. What depends on the machine is in ``environment``.
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
    """Callable that reads a composed config. Of ``engine_kwargs.vllm`` it reads what an argument holds as JSON, too:
    verl hands vLLM either form, so a row means the same in both.
    """

    def get(key: str) -> Any:
        """Value at a dotted path as plain Python; ``None`` where a part is absent or still ``???``."""
        if not f"{key}.".startswith(f"{VLLM}."):
            return _plain(OmegaConf.select(config, key))
        arguments = _plain(OmegaConf.select(config, VLLM))
        value = {name: _parsed(each) for name, each in arguments.items()} if isinstance(arguments, Mapping) else None
        for name in filter(None, key.removeprefix(VLLM).split(".")):
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value == "???" else value

    return get


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _parsed(argument: Any) -> Any:
    """An argument of vLLM's: the mapping or list that it is the JSON of, else itself."""
    if isinstance(argument, str) and argument.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(argument)
        except ValueError:
            pass
    return argument

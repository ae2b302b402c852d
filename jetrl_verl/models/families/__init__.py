# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One file per model family (base.py); every file that defines ``FAMILY`` counts, without registration."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from jetrl_verl.models.families.base import Family, UnsupportedLayer, read_whole


@cache
def _families() -> dict[str, Family]:
    modules = [import_module(f"jetrl_verl.models.families.{module.name}") for module in iter_modules(__path__)]
    return {module.FAMILY.model_type: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


def model_types() -> tuple[str, ...]:
    """``model_type`` of every supported family."""
    return tuple(_families())


def family(config: Any) -> Family:
    """The family of a Hugging Face configuration, object or mapping.

    Raises:
        UnsupportedLayer: no family has its ``model_type``.
    """
    model_type = read_whole(config, "model_type", "unknown")
    if model_type not in _families():
        raise UnsupportedLayer(f"model_type {model_type!r} is none of {', '.join(sorted(model_types()))}", "model_type")
    return _families()[model_type]

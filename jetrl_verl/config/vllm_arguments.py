# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a precision says to vLLM: the quantization method and its options, merged into the user's
``engine_kwargs.vllm``. ``rollout/arguments.py`` adds the worker extension.
"""

from collections.abc import Mapping
from typing import Any

from jetrl_verl.formats.catalog import VLLM_METHODS

from .options import JetConfig, UnsupportedConfiguration
from .support.general import overrides_of
from .support.scopes import VLLM
from .support.table import refusal


def quantization_arguments(options: JetConfig, user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with ``quantization`` and ``hf_overrides.quantization_config`` filled in.

    A value that is already ours is kept. Raises ``UnsupportedConfiguration`` where one of the two says something else.
    """
    arguments = dict(user or {})
    overrides = overrides_of(arguments.get("hf_overrides"))
    if overrides is None:
        key, value = f"{VLLM}.hf_overrides", arguments["hf_overrides"]
        raise UnsupportedConfiguration(refusal("hf_overrides", key=key, value=value, **precision_words(options)))
    arguments["hf_overrides"] = dict(overrides)

    method = VLLM_METHODS[options.rollout]
    fill(arguments, "quantization", method, options)
    quantization = {
        "quant_method": method,
        **options.for_vllm(),
        # The layers outside the contract: BF16 on both sides.
        "modules_to_not_convert": ["lm_head"],
    }
    fill(arguments["hf_overrides"], "quantization_config", quantization, options, within="hf_overrides.")
    return arguments


def fill(holder: dict[str, Any], name: str, value: Any, options: JetConfig, within: str = "") -> None:
    """Set ``holder[name]`` where it is absent; raise ``UnsupportedConfiguration`` where it is something else.

    Args:
        within: path from ``engine_kwargs.vllm`` to ``holder``, for the message.
    """
    if holder.get(name) is None:
        holder[name] = value
    elif holder[name] != value:
        key = f"{VLLM}.{within}{name}"
        raise UnsupportedConfiguration(refusal(f"vllm_{name}", key=key, **precision_words(options)))


def precision_words(options: JetConfig) -> dict[str, str]:
    """What a row's message says of a run, for one who has no composed configuration."""
    return {"jetrl.precision": options.precision}

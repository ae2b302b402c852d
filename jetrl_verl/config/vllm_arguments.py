# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Merges a precision's quantization method and options, and the passes that stay off, into the user's
``engine_kwargs.vllm``; ``rollout/arguments.py`` adds the worker extension.
"""

import json
from collections.abc import Mapping
from typing import Any

from jetrl_verl.formats.catalog import VLLM_METHODS

from .options import JetConfig
from .support.scopes import FUSIONS_OF_REDUCTIONS, VLLM
from .support.table import refuse


def overrides_of(value: Any) -> Mapping[str, Any] | None:
    """vLLM's ``hf_overrides`` as a mapping, given as one or as its JSON; None where it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    value = {} if value is None else value
    return value if isinstance(value, Mapping) else None


def quantization_arguments(options: JetConfig, user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's ``engine_kwargs.vllm`` with ``quantization`` and ``hf_overrides.quantization_config`` filled in.

    Raises ``UnsupportedConfiguration`` where the user set one of the two to something else.
    """
    arguments = dict(user or {})
    overrides = overrides_of(arguments.get("hf_overrides"))
    if overrides is None:
        value = arguments["hf_overrides"]
        refuse("hf_overrides", precision=options.precision, key=f"{VLLM}.hf_overrides", value=value)
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


def unfused_reductions(options: JetConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``compilation_config`` of the user's ``arguments`` without fusions of the sums over ranks.

    vLLM turns some on where it finds FlashInfer. A ``compilation_config`` that is no mapping is left to verl.

    Raises:
        UnsupportedConfiguration: one of them is asked for.
    """
    given = overrides_of(arguments.get("compilation_config"))
    if options.reduction != "ordered" or given is None:
        return {name: arguments[name] for name in ("compilation_config",) if name in arguments}
    passes = dict(given.get("pass_config") or {})
    for name in FUSIONS_OF_REDUCTIONS:
        if passes.get(name):
            refuse("fusions_of_reductions", key=f"{VLLM}.compilation_config.pass_config.{name}", value="true")
        passes[name] = False
    return {"compilation_config": {**given, "pass_config": passes}}


def fill(holder: dict[str, Any], name: str, value: Any, options: JetConfig, within: str = "") -> None:
    """Set ``holder[name]`` where it is absent; raise ``UnsupportedConfiguration`` where it is something else.

    Args:
        within: path from ``engine_kwargs.vllm`` to ``holder``, for the message.
    """
    if holder.get(name) is None:
        holder[name] = value
    elif holder[name] != value:
        key = f"{VLLM}.{within}{name}"
        refuse("vllm_arguments", precision=options.precision, key=key, value=holder[name])

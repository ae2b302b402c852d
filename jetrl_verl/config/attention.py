# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of the trainer's models. verl's default needs flash-attn; without it the driver writes another one into
the configuration, which every worker reads.
"""

from jetrl_verl.patches.attention_name import JETRL_ATTENTION

from .installed import installed_version, on_cpu
from .model import check_attention, overrides_of_trainer, read_model, trained_models
from .support.row import Get, UnsupportedConfiguration
from .support.scopes import CRITIC_MODEL, MODEL, ULYSSES, ULYSSES_OF_THE_CRITIC, attention_key
from .support.table import refuse

FLASH_ATTENTION = "flash_attention_2"
"""verl's default, for an ``override_config`` that names no attention."""

_ULYSSES = {MODEL: ULYSSES, CRITIC_MODEL: ULYSSES_OF_THE_CRITIC}


def attention_of(get: Get, node: str) -> str | None:
    """The attention of the model at ``node`` as verl reads it; None leaves it to transformers."""
    return (get(f"{node}.override_config") or {}).get("attn_implementation", FLASH_ATTENTION)


def no_flash_attention(*alternatives: str) -> str:
    """Why flash-attn cannot run; empty if it can, or if one of the packages that stand in for it is installed."""
    if on_cpu():
        return "flash-attn runs on no CPU"
    return "" if any(map(installed_version, ("flash-attn", *alternatives))) else "flash-attn is not installed"


def flash_attention_runs(get: Get) -> bool:
    """Whether a model of the trainer runs flash-attn."""
    return any(attention_of(get, node) == FLASH_ATTENTION for node in trained_models(get))


def chosen_attentions(get: Get) -> dict[str, str]:
    """Key and attention of each model that would run flash-attn by verl's default, where that is not installed."""
    if not no_flash_attention():
        return {}
    chosen = {}
    for node in trained_models(get):
        named = "attn_implementation" in (get(f"{node}.override_config") or {})
        if not named and (name := _without_flash_attention(get, node)):
            chosen[attention_key(node)] = name
    return chosen


def check_attention_package(precision: str, get: Get) -> None:
    """Refuse an attention of flash-attn where it is not installed, or on a CPU."""
    # Without flash-attn transformers runs kernels of its hub, if that package is installed.
    if not (why := no_flash_attention("kernels")):
        return
    for node in trained_models(get):
        if attention_of(get, node) == FLASH_ATTENTION:
            key, name = attention_key(node), _without_flash_attention(get, node)
            # With Ulysses, only flash-attn covers a model that jetrl_varlen does not.
            other = f"{key}={name}" if name else " and ".join(f"{split}=1" for split in _split_by(get, node))
            remedy = f"Set {other}" if on_cpu() else f"Install flash-attn, or set {other}"
            refuse("attention_package", precision=precision, key=key, value=FLASH_ATTENTION, why=why, remedy=remedy)


def _without_flash_attention(get: Get, node: str) -> str:
    """``jetrl_varlen``, or ``sdpa`` for a model that it does not cover; empty where sdpa does not cover the job."""
    if _covers(get, node):
        return JETRL_ATTENTION
    return "" if _split_by(get, node) else "sdpa"


def _split_by(get: Get, node: str) -> list[str]:
    """Keys of Ulysses sequence parallelism over more than one rank."""
    return [key for key in _ULYSSES[node] if (get(key) or 1) > 1]


def _covers(get: Get, node: str) -> bool:
    """Whether ``jetrl_varlen`` covers a model, as far as it can be read without a copy."""
    from jetrl_verl.models import Unsupported

    try:
        model = read_model(get(f"{node}.path"))
    except UnsupportedConfiguration:  # refused where all models are checked
        return True
    try:
        if model is not None:
            check_attention(model.changed(overrides_of_trainer(get, node)))
    except (Unsupported, UnsupportedConfiguration):
        return False
    return True

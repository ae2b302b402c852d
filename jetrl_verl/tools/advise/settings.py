# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which settings of a job are refused, switch the shared operations off, or cost equality in every bit.

Every sentence is the table's (jetrl_verl/config/support); nothing is listed here a second time.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from jetrl_verl.config.check import reader
from jetrl_verl.config.environment import cache_message, model_overrides
from jetrl_verl.config.operations import overridden_fields
from jetrl_verl.config.support.row import DRIVER, Get, Row
from jetrl_verl.config.support.scopes import VLLM
from jetrl_verl.config.support.table import COMPOSITION_ROWS, INEXACT_ROWS, model_refusal, row
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.models import UnsupportedLayer, family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools.advise.shapes import Model

REFUSED, STOCK, BITS = "refused", "stock operations", "not equal in every bit"
"""What a setting does: no precision but bf16 runs; jet_fp8 runs without shared operations; jet_fp8_exact is refused."""


STOCK_OPERATIONS = "stock"
"""Value of ``jetrl.operations``."""

ROWS: tuple[Row, ...] = (
    *COMPOSITION_ROWS,
    *(each for each in INEXACT_ROWS if each.keys and each not in COMPOSITION_ROWS),
)
"""Rows that settings show. Of those about the ``jetrl`` node alone the ones that cost exactness: the others say that
another precision's options are not ``jet_fp8``'s, under which the settings are asked."""


@dataclass(frozen=True)
class Finding:
    """One setting.

    Attributes:
        effect: ``REFUSED``, ``STOCK`` or ``BITS``. message: ``X is not supported with Y: why. Set Z.``
    """

    effect: str
    message: str


def findings(config: DictConfig, model: Model, tp: int) -> list[Finding]:
    """Everything in a configuration composed with ``precision=jet_fp8`` that costs something, worst first."""
    get = reader(config)
    overrides = model_overrides(config)
    found = [*settings_of(get), *model_findings(model, tp, overrides)]
    if get("jetrl.operations") == "auto":
        rollout = get(f"{VLLM}.hf_overrides") or {}
        found += [Finding(STOCK, message) for message in overridden_fields(model.config, overrides, rollout)]
    return [*cache_findings(get, model, any(finding.effect == STOCK for finding in found)), *found]


def settings_of(get: Get) -> list[Finding]:
    """What the settings themselves say."""

    def asked(key: str) -> Any:
        return {"jetrl.operations": "shared", "jetrl.precision": "jet_fp8"}.get(key) or get(key)

    def exact(key: str) -> Any:
        if key == "jetrl.operations" and get(key) == STOCK_OPERATIONS:
            return STOCK_OPERATIONS
        return "jet_fp8_exact" if key == "jetrl.precision" else asked(key)

    found = []
    for each in ROWS:
        if not each.scope.refused:
            continue
        read = exact if each in INEXACT_ROWS and not each.scope.stock else asked
        found += [Finding(effect_of(each), each.message(read, **words)) for words in each.met(read)]
    return sorted(dict.fromkeys(found), key=lambda each: (REFUSED, STOCK, BITS).index(each.effect))


def effect_of(cost: Row) -> str:
    """What a job has of a row's setting: ``REFUSED``, ``STOCK`` or ``BITS``."""
    if cost.scope.stock or (cost in INEXACT_ROWS and cost.keys == ("jetrl.operations",)):
        return STOCK
    return BITS if cost in INEXACT_ROWS else REFUSED


def unseen() -> str:
    """What makes the operations stock and no job shows: the machine that runs it."""
    rows = (each for each in INEXACT_ROWS if each.found == DRIVER and each.listed and not of_the_model(each))
    features = ", ".join(dict.fromkeys(each.feature for each in rows))
    return f"Stock operations too, and not seen from here: {features}. `jetrl doctor` says what a machine has."


def of_the_model(cost: Row) -> bool:
    """Whether the model's configuration shows a row, or what a job overrides in it."""
    return "{path}" in cost.what or "{field}" in cost.reason


def cache_findings(get: Get, model: Model, stock: bool) -> list[Finding]:
    """What an FP8 KV cache is refused with.

    Args:
        stock: whether something makes the operations of ``jet_fp8`` stock.
    """
    held = cache_traits(get("jetrl.kv_cache") or UNQUANTIZED)
    if not held.quantized:
        return []
    cache = row("kv_cache_of_stock_operations")
    operations = STOCK_OPERATIONS if stock or get("jetrl.operations") == STOCK_OPERATIONS else "shared"

    def asked(key: str) -> Any:
        return {"jetrl.operations": operations, "jetrl.precision": "jet_fp8"}.get(key) or get(key)

    found = [cache.message(asked, **words) for words in cache.met(asked)]
    found += filter(None, [cache_message(model.config, model.name, held)])
    return [Finding(REFUSED, message) for message in found]


def model_findings(model: Model, tp: int, overrides: dict[str, Any] | None = None) -> list[Finding]:
    """What the model's shapes and operations say."""
    found = []
    try:
        plan_linears(model.config, tp)
    except UnsupportedLayer as unfit:
        found.append(Finding(REFUSED, model_refusal(unfit, model.name, "jet_fp8")))
    try:
        ours = family(model.config)
    except UnsupportedLayer:
        return found  # said above
    uncovered = ours.uncovered_operations(ours.as_trained(model.config, overrides or {}))
    return found + [Finding(STOCK, model_refusal(each, model.name, "jet_fp8")) for each in uncovered]

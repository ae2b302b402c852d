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
from jetrl_verl.config.support.operations import EXACT_ROWS, SHARED_ROWS
from jetrl_verl.config.support.options import OPTION_ROWS
from jetrl_verl.config.support.row import Get
from jetrl_verl.config.support.table import COMPOSITION_ROWS, model_refusal
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.models import UnsupportedLayer, UnsupportedOperation, family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.tools.advise.shapes import Model

REFUSED, STOCK, BITS = "refused", "stock operations", "not equal in every bit"
"""What a setting does: no precision but bf16 runs; jet_fp8 runs without shared operations; jet_fp8_exact is refused."""


STOCK_OPERATIONS = "stock"
"""Value of ``jetrl.operations``."""


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
    found = [*settings_of(get), *model_findings(model, tp, model_overrides(config))]
    return [*cache_findings(get, model, any(finding.effect == STOCK for finding in found)), *found]


def settings_of(get: Get) -> list[Finding]:
    """What the settings themselves say."""

    def asked(key: str) -> Any:
        return {"jetrl.operations": "shared", "jetrl.precision": "jet_fp8"}.get(key) or get(key)

    def exact(key: str) -> Any:
        return "jet_fp8_exact" if key == "jetrl.precision" else asked(key)

    found = []
    for row in COMPOSITION_ROWS:
        effect = STOCK if row in SHARED_ROWS else BITS if row in EXACT_ROWS else REFUSED
        if not row.scope.refused:
            continue
        read = exact if effect == BITS else asked
        found += [Finding(effect, row.message(read, **words)) for words in row.met(read)]
    return sorted(dict.fromkeys(found), key=lambda each: (REFUSED, STOCK, BITS).index(each.effect))


def cache_findings(get: Get, model: Model, stock: bool) -> list[Finding]:
    """What an FP8 KV cache is refused with.

    Args:
        stock: whether something makes the operations of ``jet_fp8`` stock.
    """
    held = cache_traits(get("jetrl.kv_cache") or UNQUANTIZED)
    if not held.quantized:
        return []
    (row,) = (row for row in OPTION_ROWS if row.name == "kv_cache_of_stock_operations")
    operations = STOCK_OPERATIONS if stock or get("jetrl.operations") == STOCK_OPERATIONS else "shared"

    def asked(key: str) -> Any:
        return {"jetrl.operations": operations, "jetrl.precision": "jet_fp8"}.get(key) or get(key)

    found = [row.message(asked, **words) for words in row.met(asked)]
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
        ours.check_operations(ours.as_trained(model.config, overrides or {}))
    except UnsupportedLayer:
        pass  # said above
    except UnsupportedOperation as uncovered:
        found.append(Finding(STOCK, model_refusal(uncovered, model.name, "jet_fp8")))
    return found

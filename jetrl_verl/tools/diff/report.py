# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What ``jetrl diff`` says of one precision: plain values for JSON, and the tables of the terminal made from them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jetrl_verl.config.options import JetConfig
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.tools.diff.attribution import Attribution
from jetrl_verl.tools.diff.measures import Mismatch
from jetrl_verl.tools.diff.operations import KINDS
from jetrl_verl.tools.diff.recording import Recording


def summarise(
    precision: str, options: JetConfig | None, configured: Recording, recorded: Recording, found: Attribution
) -> dict[str, Any]:
    """Everything that was found about one precision, as JSON holds it.

    Args:
        configured, recorded: the two engines' answers for the same tokens. found: the trainer against the second.
    """
    trained = Mismatch.of(found.log_probs, configured.log_probs)
    engines = Mismatch.of(recorded.log_probs, configured.log_probs)
    kinds = {
        kind: {
            "without": asdict(found.without.get(kind, found.mismatch)),
            "alone": asdict(found.alone.get(kind, found.all_corrected)),
        }
        for kind in KINDS
        if kind in {operation.kind for operation in found.local}
    }
    return {
        "precision": precision,
        "options": None if options is None else options.as_dict(),
        "equal": not (trained.differing or engines.differing),
        "requests": len(recorded.prompts),
        "tokens": trained.tokens,
        "trainer_against_rollout": asdict(trained),
        "trainer_against_recorded_rollout": asdict(found.mismatch),
        "recorded_against_configured_rollout": asdict(engines),
        "first_difference": None if found.first is None else asdict(found.first),
        "operations": [
            {
                "layer": operation.layer,
                "operation": operation.name,
                "kind": operation.kind,
                "elements": local.elements,
                "own": {"share": local.share, "ulps": local.ulps},
                "accumulated": {
                    "share": found.accumulated[operation].share,
                    "ulps": found.accumulated[operation].ulps,
                },
            }
            for operation, local in found.local.items()
        ],
        "kinds": kinds,
        "all_corrected": asdict(found.all_corrected),
    }


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def _share(value: float) -> str:
    return f"{100 * value:.3g}%" if value else "0"


def _name(summary: Mapping[str, Any]) -> str:
    """The precision, and a cache that is not the precision's own."""
    options = summary["options"]
    cache = UNQUANTIZED if options is None else options["kv_cache"]
    return f"precision={summary['precision']}" + (f" jetrl.kv_cache={cache}" if cache_traits(cache).quantized else "")


def _mismatches(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"{_name(summary)}: log-probabilities", title_justify="left")
    table.add_column("")
    for name in ("k3_kl", "p99.9 |d|", "max |d|", "differing"):
        table.add_column(name, justify="right")
    for label, key in (
        ("trainer - rollout", "trainer_against_rollout"),
        ("trainer - recorded rollout", "trainer_against_recorded_rollout"),
        ("recorded - configured rollout", "recorded_against_configured_rollout"),
    ):
        row = summary[key]
        table.add_row(
            label, *(_number(row[name]) for name in ("k3_kl", "p999", "max")), f"{row['differing']} of {row['tokens']}"
        )
    return table


def _first(summary: Mapping[str, Any]) -> str:
    first = summary["first_difference"]
    if first is None:
        return "first difference: none, every element of every operation is equal"
    where = first["operation"] if first["layer"] is None else f"layer {first['layer']} {first['operation']}"
    return (
        f"first difference: {where} ({first['kind']}), request {first['request']}, position {first['position']}, "
        f"element {first['element']}: rollout {first['rollout']!r}, trainer {first['trainer']!r}, "
        f"{first['ulps']} ULP of {first['dtype']}"
    )


def _operations(summary: Mapping[str, Any]) -> Table:
    """One row per operation: the layer where it differs most by itself, and the largest figures of all layers."""
    table = Table(title="operations: by themselves, and with what came in", title_justify="left")
    for name in ("operation", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("layers", "itself", "ULPs", "worst layer", "in all", "ULPs"):
        table.add_column(name, justify="right")
    # The first layer lacks an operation: its input is no sum.
    last = max(row["layer"] for row in summary["operations"] if row["layer"] is not None)
    for name in (row["operation"] for row in summary["operations"] if row["layer"] in (None, last)):
        rows = [row for row in summary["operations"] if row["operation"] == name]
        differing = [row for row in rows if row["own"]["share"]]
        worst = max(rows, key=lambda row: row["own"]["share"])
        table.add_row(
            name,
            rows[0]["kind"],
            f"{len(differing)} of {len(rows)}",
            _share(worst["own"]["share"]),
            str(max(row["own"]["ulps"] for row in rows)),
            "" if not differing or worst["layer"] is None else str(worst["layer"]),
            _share(max(row["accumulated"]["share"] for row in rows)),
            str(max(row["accumulated"]["ulps"] for row in rows)),
        )
    return table


def _kinds(summary: Mapping[str, Any]) -> Table:
    table = Table(title="k3_kl by what it comes from", title_justify="left")
    table.add_column("")
    table.add_column("without it", justify="right")
    table.add_column("alone", justify="right")
    options = summary["options"]
    quantized = options is not None and options["rollout"] != UNQUANTIZED
    for kind, row in summary["kinds"].items():
        label = "linear (quantization)" if kind == "linear" and quantized else kind
        table.add_row(label, _number(row["without"]["k3_kl"]), _number(row["alone"]["k3_kl"]))
    table.add_row(
        "compiler + batching",
        _number(summary["trainer_against_recorded_rollout"]["k3_kl"]),
        _number(summary["recorded_against_configured_rollout"]["k3_kl"]),
    )
    return table


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Print one precision's part of the report."""
    console.print(_mismatches(summary))
    console.print(_first(summary), highlight=False, soft_wrap=True)
    console.print(_operations(summary))
    console.print(_kinds(summary))
    corrected = summary["all_corrected"]
    console.print(
        f"all corrected: {_number(corrected['max'])} ({corrected['differing']} of {corrected['tokens']} tokens differ)",
        highlight=False,
    )
    verdict = "equal in all 32 bits" if summary["equal"] else "not equal"
    console.print(f"{_name(summary)}: {summary['tokens']} log-probabilities {verdict}\n", highlight=False)

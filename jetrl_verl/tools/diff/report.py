# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report of ``jetrl diff`` on one precision: values for JSON, and tables for the terminal made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jetrl_verl.config.job import Job
from jetrl_verl.formats.catalog import UNQUANTIZED, cache_traits
from jetrl_verl.tools.diff.attribution import Attribution
from jetrl_verl.tools.diff.measures import Mismatch, Spread
from jetrl_verl.tools.diff.operations import KINDS, Operation
from jetrl_verl.tools.diff.recording import Recording


def summarize(
    precision: str, job: Job | None, configured: Recording, recorded: Recording, attribution: Attribution
) -> dict[str, Any]:
    """All results of one precision for JSON. ``attribution`` compares the trainer with ``recorded``."""
    trained = Mismatch.of(attribution.log_probs, configured.log_probs)
    engines = Mismatch.of(recorded.log_probs, configured.log_probs)
    kinds = {
        kind: {
            "without": asdict(attribution.without.get(kind, attribution.mismatch)),
            "alone": asdict(attribution.alone.get(kind, attribution.all_corrected)),
        }
        for kind in KINDS
        if kind in {operation.kind for operation in attribution.local}
    }
    return {
        "precision": precision,
        "options": None if job is None else job.as_dict(),
        "runs": {} if job is None else job.facts(),
        "equal": not (trained.differing or engines.differing),
        "requests": len(recorded.prompts),
        "tokens": trained.tokens,
        "trainer_against_rollout": asdict(trained),
        "trainer_against_recorded_rollout": asdict(attribution.mismatch),
        "recorded_against_configured_rollout": asdict(engines),
        "first_difference": None if attribution.first is None else asdict(attribution.first),
        "operations": [
            {
                "layer": operation.layer,
                "operation": operation.name,
                "kind": operation.kind,
                "elements": local.elements,
                "own": _spread(local),
                "accumulated": _spread(attribution.accumulated[operation]),
            }
            for operation, local in attribution.local.items()
        ],
        "kinds": kinds,
        "all_corrected": asdict(attribution.all_corrected),
    }


def _spread(spread: Spread) -> dict[str, Any]:
    return {"share": spread.share, "ulps": spread.ulps}


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def _share(value: float) -> str:
    return f"{100 * value:.3g}%" if value else "0"


def _name(summary: Mapping[str, Any]) -> str:
    """The precision, and a quantized KV cache."""
    options = summary["options"]
    cache = UNQUANTIZED if options is None else options["kv_cache"]
    return f"precision={summary['precision']}" + (f" jetrl.kv_cache={cache}" if cache_traits(cache).quantized else "")


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _mismatches(summary: Mapping[str, Any]) -> Table:
    table = _table(f"{_name(summary)}: log-probabilities", [""], ["k3_kl", "p99.9 |d|", "max |d|", "differing"])
    for label, key in (
        ("trainer - rollout", "trainer_against_rollout"),
        ("trainer - recorded rollout", "trainer_against_recorded_rollout"),
        ("recorded - configured rollout", "recorded_against_configured_rollout"),
    ):
        row = summary[key]
        figures = [_number(row[name]) for name in ("k3_kl", "p999", "max")]
        table.add_row(label, *figures, f"{row['differing']} of {row['tokens']}")
    return table


def _first(summary: Mapping[str, Any]) -> str:
    first = summary["first_difference"]
    if first is None:
        return "first difference: none, every element of every operation is equal"
    operation = Operation(first["layer"], first["operation"])
    return (
        f"first difference: {operation} ({first['kind']}), request {first['request']}, position {first['position']}, "
        f"element {first['element']}: rollout {first['rollout']!r}, trainer {first['trainer']!r}, "
        f"{first['ulps']} ULP of {first['dtype']}"
    )


def _operations(summary: Mapping[str, Any]) -> Table:
    """One row per operation: the layer with the largest local difference, and the largest figures of all layers."""
    figures = ["layers", "itself", "ULPs", "worst layer", "in all", "ULPs"]
    table = _table("operations: alone, and with earlier differences", ["operation", "kind"], figures)
    # The first layer lacks an operation: its input is not a sum.
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
    table = _table("k3_kl by what it comes from", [""], ["without it", "alone"])
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
    """Print the report of one precision."""
    console.print(_mismatches(summary))
    # The precision is a preset.
    console.print("; ".join(f"{name}: {value}" for name, value in summary["runs"].items()), highlight=False)
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

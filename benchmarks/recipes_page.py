# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/recipes_on_gpu.md, from what benchmarks/recipes_on_gpu.sh has left in benchmarks/results.

    python3 -m benchmarks.recipes_page            # print them
    python3 -m benchmarks.recipes_page --write    # into the page

A row for each run that benchmarks/recipes.py defines, a recipe under a precision, also for one that has no record. What
a run was cut to is read from the words that it was started with; those of a run without a record are what it would get.
No GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pages import with_written
from benchmarks.published_shapes import PUBLISHED
from benchmarks.recipes import BEFORE, EIGHT_BIT, RECIPES, STEPS, Job, chosen
from benchmarks.verl_runs import TIME_UP

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/recipes_h200.json"
SHIPPED = ROOT / "benchmarks/results/recipes_shipped_h200.json"
"""Runs that shared one GPU, and ``--shipped`` runs of several."""

PAGE = ROOT / "docs/recipes_on_gpu.md"

NOT_RUN = "not run"
PHASES = {
    "gen_s": "generation",
    "old_log_prob_s": "old log-probs",
    "ref_s": "reference",
    "update_actor_s": "update",
    "update_weights_s": "sync",
    "step_s": "step",
}
"""Figure of a run -> its column; seconds, medians behind the first step."""

Run = Mapping[str, Any]


def tables(record: Mapping[str, Any]) -> str:
    """Both tables, as Markdown.

    Args:
        record: ``recipes.json`` of benchmarks/recipes.py.

    Raises:
        ValueError: a run of a tiny model on a CPU, or of a recipe that is not defined (any more).
    """
    if record["tiny"]:
        raise ValueError("the record has runs of tiny models on a CPU; take them on a GPU, without --tiny.")
    runs = {
        (run["recipe"], run["precision"]): run for run in record["runs"] if BEFORE.items() <= {**BEFORE, **run}.items()
    }
    defined = chosen([])
    if unknown := sorted(runs.keys() - set(defined)):
        raise ValueError(f"{':'.join(unknown[0])} is recorded and no run of benchmarks/recipes.py; drop its record.")
    job = Job(Path(), tiny=False, whole=record["whole"], mean_response=record["mean_response"])
    ended = [run for run in runs.values() if run["status"] == 0]
    head = ["recipe", "precision", "steps", *PHASES.values(), "k3_kl", "tokens of a response", "peak GiB"]
    rows = [head + ["cut to", "GPU", "commit"], *(_row(job, name, runs.get(name)) for name in defined)]
    said = f"{len(ended)} of {len(defined)} runs have ended well, {len(defined) - len(runs)} have not been taken."
    return f"{said}\n\n{_markdown(rows)}\n\n{_markdown(_sizes(job))}"


def shipped_table(record: Mapping[str, Any]) -> str:
    """The table of runs with their scripts' own numbers, as Markdown; ``record`` as for :func:`tables`."""
    job = Job(Path(), tiny=False, mean_response=record["mean_response"], shipped=True, prompts=record["prompts"])
    head = ["recipe", "precision", "GPUs", "prompts", "steps", *PHASES.values(), "k3_kl", "tokens of a response"]
    rows = [[*head, "peak GiB", "a GPU's peak GiB", "cut to", "GPU", "commit"]]
    for run in record["runs"]:
        name = run["recipe"], run["precision"]
        recipe = RECIPES[run["recipe"]]
        prompts = f"{replace(job, gpus=run['gpus']).batch(recipe)[0]} of {recipe.shipped.prompts}"
        gpu_peak = _figure(max(run["gpu_peak_gib"])) if run.get("gpu_peak_gib") else ""
        first = [name[0], f"`{name[1]}`", str(run["gpus"]), prompts]
        rows.append([*first, *_figures(run), gpu_peak, _cut(job, *name, run), *_build(run)])
    return _markdown(rows)


def page(record: Mapping[str, Any], shipped: Mapping[str, Any]) -> str:
    """All that the page has between its marks."""
    said = (
        "**With the script's own numbers, on several GPUs** (`--shipped`): one run at a time, whole models, the batch\n"
        "scaled as the column *prompts* says. *A GPU's peak* counts trainer and rollout, and what both hold besides."
    )
    return f"{tables(record)}\n\n{said}\n\n{shipped_table(shipped)}"


def _row(job: Job, name: tuple[str, str], run: Run | None) -> list[str]:
    recipe, precision = name
    if run is None:
        return [recipe, f"`{precision}`", NOT_RUN, *[""] * (len(PHASES) + 3), _cut(job, *name, None), "", ""]
    return [recipe, f"`{precision}`", *_figures(run), _cut(job, *name, run), *_build(run)]


def _figures(run: Run) -> list[str]:
    """Steps, seconds of the phases, k3_kl, tokens of a response and the trainer's peak."""
    seconds = [_figure(run.get(figure)) for figure in PHASES]
    more = [_divergence(run.get("k3_kl")), _figure(run.get("response_length")), _figure(run.get("peak_gib"))]
    return [_steps(run), *seconds, *more]


def _build(run: Run) -> tuple[str, str]:
    build = run["build"]
    commit = build["commit"][:7] + (" with changes" if build["dirty"] is not False else "")
    return (build["gpu"] or "unknown").removeprefix("NVIDIA "), commit


def _steps(run: Run) -> str:
    steps = run.get("steps", 0)
    if run["status"] == 0:
        return str(steps)
    ended = "time was up" if run["status"] == TIME_UP else f"failed, status {run['status']}"
    return f"{steps} of {run.get('of_steps', STEPS)}, {ended}"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _divergence(value: float | None) -> str:
    return "" if value is None else "**0**" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


def _cut(job: Job, name: str, precision: str, run: Run | None) -> str:
    """Layers, moments and offload of a run, from the words of its record or, without one, from those that it gets."""
    recipe = RECIPES[name]
    words = set(run["words"] if run is not None and "words" in run else job.words(name, precision))
    layers, published = job.layers(recipe), PUBLISHED[recipe.model].fields["num_hidden_layers"]
    parts = [f"`{recipe.model}` for `{recipe.stands_for}`"] if recipe.stands_for else []
    parts.append(f"{layers} of {published} layers" if layers else "all layers")
    parts.append("8-bit AdamW" if set(EIGHT_BIT) <= words else "FP32 AdamW")
    offloads = [what for what in ("param", "optimizer") if any(f"{what}_offload=True" in word for word in words)]
    return ", ".join([*parts, f"{' and '.join(offloads)} offload" if offloads else "no offload"])


def _sizes(job: Job) -> list[list[str]]:
    """Head and a line for each recipe: what of its runs is the same under every precision."""
    lines = [["recipe", "script", "model's shape", "prompts x responses", "tokens of a micro-batch", "sets"]]
    for name, recipe in RECIPES.items():
        settings = [f"`{key}={value}`" for key, value in recipe.settings.items()]
        script = f"[{Path(recipe.script).name}](../recipes/{recipe.script})"
        batch = f"{recipe.prompts} x {recipe.samples}"
        lines.append([name, script, f"`{recipe.model}`", batch, str(recipe.tokens), " ".join(settings)])
    return lines


def _markdown(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/recipes_on_gpu.md")
    options = parser.parse_args()
    found = page(json.loads(RECORD.read_text()), json.loads(SHIPPED.read_text()))
    if options.write:
        PAGE.write_text(with_written(PAGE.read_text(), found))
    else:
        print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Several precisions on one job: one table and one page, with the noise beside every difference.

An accuracy from the engine of a precision includes the error of that engine. So the accuracies here come from one BF16
engine, which answers the same prompts with the final weights of every run (tools/compare/evaluate.py). This file only
computes statistics: the accuracy of a precision is the mean over problems of the mean over its seeds and samples; its
error is the standard error over problems; the difference to the first precision is taken per problem, which removes the
noise that both share; the spread of seeds is what repeating the training changes.
"""

import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetrl_verl.tools.provenance import builds_in, builds_note
from jetrl_verl.tools.report import MISMATCH, REWARD, STEP_SECONDS, Run, html_table, write_report

Scores = Mapping[float, Sequence[Sequence[float]]]
"""Temperature -> problem -> sample -> score."""

CAPTION = (
    "Accuracy: final weights of every precision in one BF16 engine, same prompts, ± one standard error over problems. "
    "Δ: difference to the first trained precision, paired by problem, ± its standard error. Between seeds: standard "
    "deviation between the runs of a precision. All other columns come from the training."
)


@dataclass(frozen=True)
class Trained:
    """One run and the scores of its final weights; ``run`` is None for the policy before training.

    ``scored_by`` is the build (tools/provenance.py) that scored them, None if it is not recorded.
    """

    precision: str
    seed: int | None
    scores: Scores
    run: Run | None = None
    scored_by: Mapping | None = None


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a precision at one temperature.

    Attributes:
        mean: over problems. error: standard error of it over problems.
        difference, difference_error: to the first precision, paired by problem; None for that precision.
        spread: standard deviation of the seeds' means; None for a single seed.
    """

    mean: float
    error: float
    difference: float | None
    difference_error: float | None
    spread: float | None


@dataclass(frozen=True)
class Row:
    """One precision of the table: accuracies by temperature, and means over its seeds of its training metrics."""

    precision: str
    seeds: int
    accuracies: Mapping[float, Accuracy]
    reward: float | None
    k3_kl: float | None
    entropy: float | None
    clip_fraction: float | None
    step_seconds: float | None


def summarise(trained: Sequence[Trained], baseline: str | None = None) -> list[Row]:
    """One row per precision, in order of appearance.

    Differences are to ``baseline``, by default the first trained precision; there are none if it is not in ``trained``.

    Raises:
        ValueError: the precisions answered different problems, or there is no trained one.
    """
    precisions: dict[str, list[Trained]] = {}
    for entry in trained:
        precisions.setdefault(entry.precision, []).append(entry)
    first = next((precision for precision, members in precisions.items() if members[0].run is not None), None)
    if first is None:
        raise ValueError("A comparison needs at least one trained precision.")
    baseline = baseline or first
    rows = []
    for precision, members in precisions.items():
        accuracies = {
            temperature: _accuracy(members, precisions.get(baseline) if precision != baseline else None, temperature)
            for temperature in members[0].scores
        }
        runs = [member.run for member in members if member.run is not None]
        seconds = [value for run in runs for value in run.series(STEP_SECONDS)[1]]
        rows.append(
            Row(
                precision,
                len(runs),
                accuracies,
                _mean([run.series(REWARD)[1][-1] for run in runs if run.series(REWARD)[1]]),
                _mean([run.mean(MISMATCH) for run in runs]),
                _mean([run.series("actor/entropy")[1][-1] for run in runs if run.series("actor/entropy")[1]]),
                _mean([run.mean("actor/pg_clipfrac") for run in runs]),
                statistics.median(seconds) if seconds else None,
            )
        )
    return rows


def _accuracy(members: Sequence[Trained], baseline: Sequence[Trained] | None, temperature: float) -> Accuracy:
    problems = _per_problem(members, temperature)
    difference = difference_error = None
    if baseline is not None:
        reference = _per_problem(baseline, temperature)
        if len(reference) != len(problems):
            raise ValueError(
                f"{members[0].precision} answered {len(problems)} problems and {baseline[0].precision} answered "
                f"{len(reference)}. Evaluate both again with the same data."
            )
        differences = [ours - theirs for ours, theirs in zip(problems, reference)]
        difference, difference_error = statistics.fmean(differences), _standard_error(differences)
    means = [statistics.fmean(map(statistics.fmean, member.scores[temperature])) for member in members]
    spread = statistics.stdev(means) if len(means) > 1 else None
    return Accuracy(statistics.fmean(problems), _standard_error(problems), difference, difference_error, spread)


def _per_problem(members: Sequence[Trained], temperature: float) -> list[float]:
    """Mean over seeds and samples of each problem."""
    by_seed = [[statistics.fmean(samples) for samples in member.scores[temperature]] for member in members]
    if len({len(problems) for problems in by_seed}) > 1:
        raise ValueError(f"The seeds of {members[0].precision} answered different problems. Evaluate them again.")
    return [statistics.fmean(values) for values in zip(*by_seed)]


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# --- table -----------------------------------------------------------------------------------------------------------


def temperature_name(temperature: float) -> str:
    """``greedy`` or ``T=1``."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table as text; empty columns are left out."""
    temperatures = list(rows[0].accuracies)
    header = ["precision", "seeds"]
    for temperature in temperatures:
        name = temperature_name(temperature)
        header += [f"accuracy, {name}", f"Δ, {name}", f"between seeds, {name}"]
    header += ["last reward", "k3 KL", "entropy", "clipped", "s/step"]
    body = []
    for row in rows:
        line = [row.precision, str(row.seeds) if row.seeds else ""]
        for temperature in temperatures:
            found = row.accuracies[temperature]
            line.append(f"{found.mean:.1%} ± {found.error:.1%}")
            line.append(_signed(found.difference, found.difference_error))
            line.append("" if found.spread is None else f"{found.spread:.1%}")
        line += [
            _number(row.reward, ".3f"),
            _number(row.k3_kl, ".1e"),
            _number(row.entropy, ".3f"),
            _number(row.clip_fraction, ".2%"),
            _number(row.step_seconds, ".1f"),
        ]
        body.append(line)
    filled = [i for i in range(len(header)) if any(line[i] for line in body)]
    return [header[i] for i in filled], [[line[i] for i in filled] for line in body]


def _signed(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} ± {100 * error:.1f} points"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def as_markdown(rows: Sequence[Row], unscored: Sequence[str] = (), builds: Sequence[str] = ()) -> str:
    """The table in Markdown, followed by the runs without a score, the caption and the builds."""
    header, body = cells(rows)
    table = [header, ["---"] * len(header), *body]
    return "\n\n".join(["\n".join(f"| {' | '.join(line)} |" for line in table), *_notes(unscored), *builds]) + "\n"


def _notes(unscored: Sequence[str]) -> list[str]:
    """The notes under the table."""
    missing = f"Not in the table, because the evaluation did not score it: {', '.join(unscored)}."
    return [missing, CAPTION] if unscored else [CAPTION]


def build_notes(trained: Sequence[Trained], across_builds: bool = False) -> list[str]:
    """One sentence on the builds that trained ``trained``, and one on the builds that scored them.

    The two may differ: trainings are compared with trainings, and scores with scores.

    Raises:
        ToolError: the trainings, or the scores, come from several builds, and ``across_builds`` is not set.
    """
    names = {f"{entry.precision} seed {entry.seed}" if entry.run else entry.precision: entry for entry in trained}
    runs = {name: builds_in(entry.run.facts) for name, entry in names.items() if entry.run}
    scores = {name: [entry.scored_by] for name, entry in names.items()}
    return [f"Training. {builds_note(runs, across_builds)}", f"Evaluation. {builds_note(scores, across_builds)}"]


def as_json(rows: Sequence[Row], trained: Sequence[Trained], facts: Mapping) -> str:
    """The table and everything it is computed from, all scores included."""
    tables = [
        {
            **{name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "accuracies"},
            "accuracies": {str(t): vars(accuracy) for t, accuracy in row.accuracies.items()},
        }
        for row in rows
    ]
    scores = [
        {
            "precision": entry.precision,
            "seed": entry.seed,
            "builds": builds_in(entry.run.facts) if entry.run else [],
            "scored_by": entry.scored_by,
            "scores": {str(t): table for t, table in entry.scores.items()},
        }
        for entry in trained
    ]
    # NaN (the error of a single problem) is not valid JSON.
    return json.dumps(_finite({"facts": dict(facts), "rows": tables, "trained": scores}), indent=1)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(rows: Sequence[Row], console: Console) -> None:
    """The table in a terminal, one column per precision: there are few precisions and many figures."""
    header, body = cells(rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate([header[0], *(line[0] for line in body)]):
        table.add_column(name, justify="right" if i else "left")
    for i, name in enumerate(header[1:], start=1):
        table.add_row(name, *(line[i] for line in body))
    console.print(table)


# --- page ------------------------------------------------------------------------------------------------------------


def write_comparison(
    trained: Sequence[Trained],
    folder: Path,
    facts: Mapping,
    title: str,
    baseline: str | None = None,
    unscored: Sequence[str] = (),
    across_builds: bool = False,
) -> list[Row]:
    """Write ``compare.html`` with its PNGs, ``compare.md`` and ``compare.json`` into ``folder``; returns the rows.

    ``baseline`` is that of :func:`summarise`; ``unscored`` are named under the table. ``across_builds`` allows
    trainings, or scores, of several builds; the page says so.

    Raises:
        ToolError: they come from several builds, and ``across_builds`` is not set.
    """
    builds = build_notes(trained, across_builds)
    rows = summarise(trained, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text(as_markdown(rows, unscored, builds))
    (folder / "compare.json").write_text(as_json(rows, trained, facts))
    runs = [entry.run for entry in trained if entry.run is not None]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in (*_notes(unscored), *builds))
    write_report(runs, folder / "compare.html", title, summary=html_table(*cells(rows)) + notes)
    return rows

# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Several precisions on one job: one table and one page, with the noise beside every difference.

What an arm's own engine says of its accuracy contains that engine's precision. So the accuracies here come from one
BF16 engine that answered the same prompts with every arm's final weights (compare/evaluate.py), and this file only
counts: an arm's accuracy is the mean over problems of the mean over its seeds and samples; its error is the standard
error over problems; the difference to the first arm is taken problem by problem, which removes the part of the noise
that both share; the spread of seeds is what repeating the training changes.
"""

import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from jetrl_verl.observe.report import (
    FIGURES,
    MISMATCH,
    NEUTRAL,
    PALETTE,
    REWARD,
    STEP_SECONDS,
    Figure,
    Run,
    lines,
    write_report,
)

Scores = Mapping[float, Sequence[Sequence[float]]]
"""Temperature -> problem -> sample -> score."""

CAPTION = (
    "Accuracy: every arm's final weights in one BF16 engine, the same prompts, ± one standard error over the problems. "
    "Δ: difference to the first arm that was trained, problem by problem, ± its standard error. Between seeds: the "
    "standard deviation between the trainings of an arm. All else is the arm's own, from its training."
)


@dataclass(frozen=True)
class Trained:
    """One training and what its final weights scored; ``run`` is None for the weights before training."""

    arm: str
    seed: int | None
    scores: Scores
    run: Run | None = None


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of an arm at one temperature.

    Attributes:
        mean: over problems. error: standard error of it over problems.
        difference, difference_error: to the first arm, paired by problem; None for that arm.
        spread: standard deviation of the seeds' means; None for a single seed.
    """

    mean: float
    error: float
    difference: float | None
    difference_error: float | None
    spread: float | None


@dataclass(frozen=True)
class Row:
    """One arm of the table: accuracies by temperature, and means over its seeds of what it logged in training."""

    arm: str
    seeds: int
    accuracies: Mapping[float, Accuracy]
    reward: float | None
    k3_kl: float | None
    entropy: float | None
    clip_fraction: float | None
    step_seconds: float | None


def summarise(trained: Sequence[Trained], baseline: str | None = None) -> list[Row]:
    """One row per arm, in order of appearance.

    Differences are to ``baseline``, the first arm that was trained if None; there are none if it is not in ``trained``.

    Raises:
        ValueError: the arms did not answer the same problems, or nothing was trained.
    """
    arms: dict[str, list[Trained]] = {}
    for entry in trained:
        arms.setdefault(entry.arm, []).append(entry)
    first = next((arm for arm, members in arms.items() if members[0].run is not None), None)
    if first is None:
        raise ValueError("a comparison needs at least one arm that was trained")
    baseline = baseline or first
    rows = []
    for arm, members in arms.items():
        accuracies = {
            temperature: _accuracy(members, arms.get(baseline) if arm != baseline else None, temperature)
            for temperature in members[0].scores
        }
        runs = [member.run for member in members if member.run is not None]
        seconds = [value for run in runs for value in run.series(STEP_SECONDS)[1]]
        rows.append(
            Row(
                arm,
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
                f"{members[0].arm} answered {len(problems)} problems and {baseline[0].arm} {len(reference)}; "
                "evaluate both again with the same data"
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
        raise ValueError(f"the seeds of {members[0].arm} answered different problems; evaluate them again")
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
    """Header and rows of the table as text; a column that no row fills is left out."""
    temperatures = list(rows[0].accuracies)
    header = ["arm", "seeds"]
    for temperature in temperatures:
        name = temperature_name(temperature)
        header += [f"accuracy, {name}", f"Δ, {name}", f"between seeds, {name}"]
    header += ["last reward", "k3 KL", "entropy", "clipped", "s/step"]
    body = []
    for row in rows:
        line = [row.arm, str(row.seeds) if row.seeds else ""]
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


def as_markdown(rows: Sequence[Row], unscored: Sequence[str] = ()) -> str:
    """The table in Markdown, below it what it lacks, and the caption."""
    header, body = cells(rows)
    table = [header, ["---"] * len(header), *body]
    return "\n\n".join(["\n".join(f"| {' | '.join(line)} |" for line in table), *_notes(unscored)]) + "\n"


def _notes(unscored: Sequence[str]) -> list[str]:
    """What is written under the table."""
    missing = f"Not in the table, because the evaluation did not score it: {', '.join(unscored)}."
    return [missing, CAPTION] if unscored else [CAPTION]


def as_json(rows: Sequence[Row], trained: Sequence[Trained], facts: Mapping) -> str:
    """Everything the table is made from, every score included."""
    tables = [
        {
            **{name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "accuracies"},
            "accuracies": {str(t): vars(accuracy) for t, accuracy in row.accuracies.items()},
        }
        for row in rows
    ]
    scores = [
        {"arm": entry.arm, "seed": entry.seed, "scores": {str(t): table for t, table in entry.scores.items()}}
        for entry in trained
    ]
    # NaN (the error of a single problem) is no JSON.
    return json.dumps(_finite({"facts": dict(facts), "rows": tables, "trained": scores}), indent=1)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(rows: Sequence[Row], console: Console) -> None:
    """The table in a terminal, an arm per column: a comparison has few arms and many figures."""
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
) -> list[Row]:
    """Write ``compare.html`` with its PNGs, ``compare.md`` and ``compare.json`` into ``folder``; returns the rows.

    ``baseline`` is that of :func:`summarise`; ``unscored`` are named under the table.
    """
    rows = summarise(trained, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text(as_markdown(rows, unscored))
    (folder / "compare.json").write_text(as_json(rows, trained, facts))
    runs = [entry.run for entry in trained if entry.run is not None]
    figures = (_evaluation_figure(rows), *FIGURES, _STEP_SECONDS)
    write_report(runs, folder / "compare.html", title, figures, _table_html(rows, unscored))
    return rows


def _table_html(rows: Sequence[Row], unscored: Sequence[str]) -> str:
    header, body = cells(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines_html = "".join(
        f"<tr><th>{html.escape(line[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line[1:])}</tr>"
        for line in body
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines_html}</tbody></table>"
    return table + "".join(f"<p class='absent'>{html.escape(note)}</p>" for note in _notes(unscored))


def _evaluation_figure(rows: Sequence[Row]) -> Figure:
    """Accuracy of each arm with its standard error; the first arm's mean as a line through all."""

    def draw(axes: plt.Axes, runs: Sequence[Run]) -> bool:
        temperatures = list(rows[0].accuracies)
        first = next(row for row in rows if row.seeds)
        colours = {row.arm: PALETTE[i % len(PALETTE)] for i, row in enumerate(row for row in rows if row.seeds)}
        for j, temperature in enumerate(temperatures):
            for i, row in enumerate(rows):
                found = row.accuracies[temperature]
                axes.errorbar(
                    found.mean,
                    i + 0.22 * (j - (len(temperatures) - 1) / 2),
                    xerr=found.error,
                    fmt="os^D"[j % 4],
                    color=colours.get(row.arm, NEUTRAL),
                    markersize=6,
                    capsize=3,
                    label=temperature_name(temperature) if row is first else None,
                )
            axes.axvline(first.accuracies[temperature].mean, color=colours[first.arm], lw=0.8, ls=":")
        axes.set_yticks(range(len(rows)), [row.arm for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("share answered rightly")
        if len(temperatures) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return True

    return Figure(
        "evaluation",
        "Accuracy in one BF16 engine",
        "Final weights of every arm, the same prompts, ± one standard error over the problems; dotted: the first arm.",
        draw,
    )


_STEP_SECONDS = Figure(
    "step_seconds",
    "Seconds per step",
    "Whole step, validation left out.",
    lines((STEP_SECONDS, "seconds"), ylabel="seconds", bottom=0.0),
)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study on one page: ``python -m benchmarks.study.plot --out DIR`` writes ``DIR/study.{html,md,json}`` and the
curves.

The verdict is computed by the rule that docs/study.md fixed before the first run. A precision differs from BF16 at a
temperature only if its difference exceeds each of

* twice the standard error of the paired difference over the test problems,
* the largest difference between BF16's seeds,
* what another start of the engine changed in the score of the policy before training.

There is no verdict where BF16 has one seed, learnt nothing, or solves more than nine of ten problems. Figures logged in
training are means over the last steps in the table, and over all steps in bars and in the JSON. They get no verdict;
a row shows the difference between BF16's two seeds for comparison.
"""

import argparse
import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.evaluate import before_files, folder_of, runs_in
from benchmarks.study.run import StudyRun, control, every_run
from benchmarks.study.warm_up import StudyError
from jetrl_verl.tools import ToolError
from jetrl_verl.tools.compare.evaluate import BEFORE, file_of
from jetrl_verl.tools.compare.run import builds_of, folder_of_runs, records_of
from jetrl_verl.tools.compare.table import Accuracy, Row, Scores, Trained, build_notes, summarise, temperature_name
from jetrl_verl.tools.report import FIGURES, INK, NEUTRAL, PALETTE, Figure, Run, bars, lines, write_report

LAST_STEPS = 10
"""Steps at the end of a run whose mean is its final figure."""

SATURATED = 0.9
"""Accuracy of BF16 above which the task is too easy to tell precisions apart."""

_QDATA = tuple(f"actor/jetrl/qdata_changed/{kind}" for kind in ("qkv", "o", "gate_up", "down"))

_BOUND_IN_THE_LOSS = {
    f"actor/jetrl/truncated/{sign}": f"rollout_corr/truncated/{sign}" for sign in ("negative", "positive")
}
"""QuRL bounds importance weights in its loss, so the bound of the correction is never reached and its share is 0."""

LOGGED = (
    ("reward", ("critic/score/mean",), ".3f"),
    ("k3 KL", ("rollout_corr/k3_kl",), ".1e"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("tokens", ("response_length/mean",), ".0f"),
    ("cut off", ("response_length/clip_ratio",), ".2%"),
    ("clipped, A<0", ("actor/jetrl/clipped/negative",), ".3%"),
    ("clipped, A>0", ("actor/jetrl/clipped/positive",), ".3%"),
    ("truncated, A<0", ("rollout_corr/truncated/negative",), ".3%"),
    ("truncated, A>0", ("rollout_corr/truncated/positive",), ".3%"),
    ("qdata changed", _QDATA, ".2%"),
    ("s/step", ("timing_s/step",), ".1f"),
)
"""Columns: name, metrics that are averaged, format."""

STUDY_FIGURES = (
    Figure(
        "clipped",
        "Clipped tokens by sign of advantage",
        "Share of response tokens that the policy loss clipped: mean over all steps, a dot for each seed.",
        bars(
            ("actor/jetrl/clipped/negative", "negative"),
            ("actor/jetrl/clipped/positive", "positive"),
            xlabel="share of tokens",
        ),
    ),
    Figure(
        "truncated",
        "Truncated importance weights by sign of advantage",
        "Share of response tokens whose importance weight left its bounds, in precisions that correct for the "
        "mismatch: mean over all steps, a dot for each seed.",
        bars(
            ("rollout_corr/truncated/negative", "negative"),
            ("rollout_corr/truncated/positive", "positive"),
            xlabel="share of tokens",
        ),
    ),
    Figure(
        "cut_off",
        "Responses cut off",
        "Share of responses that reached the longest length allowed.",
        lines(("response_length/clip_ratio", "share"), ylabel="share of responses", bottom=0.0),
    ),
    Figure(
        "qdata_changed",
        "Weight qdata that a sync changed",
        "Share of E4M3 qdata of the gate and up projections that differ from the sync before.",
        lines(("actor/jetrl/qdata_changed/gate_up", "share"), ylabel="share of qdata", bottom=0.0),
    ),
)


PRIMARY = 1.0
"""Temperature of the accuracy that decides."""

PAIRS = (
    ("qurl_int8", "int8_rollout_tis"),
    ("qurl_int8", "bf16_lr_1_5"),
    ("fp8_rollout_tis", "fp8_rollout"),
    ("jet_fp8_calibrated", "jet_fp8"),
)
"""Precisions that are also compared with each other: the second is what the first is claimed to beat."""


@dataclass(frozen=True)
class Noise:
    """What a difference to BF16 must exceed, at one temperature; all in shares of problems.

    Attributes:
        seeds: largest difference between BF16's seeds, None for one seed.
        engine: what another start of the engine changed.
        gain: what BF16 learnt. gain_error: its standard error. final: BF16's accuracy.
    """

    seeds: float | None
    engine: float
    gain: float
    gain_error: float
    final: float

    def bound(self, found: Accuracy) -> float:
        """The difference that ``found`` must exceed."""
        return max(2 * (found.difference_error or 0.0), self.seeds or 0.0, self.engine)

    def verdict(self, found: Accuracy, seeds: int) -> str:
        """The verdict on ``found``, the accuracy of a precision with ``seeds`` seeds."""
        if self.seeds is None:
            return "no verdict: BF16 needs two seeds"
        if self.gain <= 2 * self.gain_error:
            return "no verdict: BF16 learnt nothing"
        if self.final > SATURATED:
            return "no verdict: the task is too easy"
        if abs(found.difference) <= self.bound(found):
            return "inside the noise"
        side = "above BF16" if found.difference > 0 else "below BF16"
        return side if seeds > 1 else f"{side}, one seed"


def noise_of(bf16: Row, seeds: Sequence[Scores], before: Sequence[Scores], temperature: float) -> Noise:
    """The noise at one temperature.

    Args:
        bf16: row of the first precision. seeds: its scores, one table per seed.
        before: scores of the policy before training, one table per evaluation.
        temperature: of the sampling; 0 is greedy.
    """

    def problems(scores: Scores) -> list[float]:
        return [statistics.fmean(samples) for samples in scores[temperature]]

    found, first = bf16.accuracies[temperature], problems(before[0])
    trained, starts = ([statistics.fmean(problems(scores)) for scores in group] for group in (seeds, before))
    return Noise(
        seeds=max(trained) - min(trained) if len(trained) > 1 else None,
        engine=max(starts) - min(starts),
        gain=found.mean - statistics.fmean(starts),
        gain_error=math.hypot(found.error, statistics.stdev(first) / math.sqrt(len(first))),
        final=found.mean,
    )


def read_scores(files: Sequence[Path]) -> list[Scores]:
    """Contents of files of ``evaluate.py``: temperature -> problem -> sample -> score.

    Raises:
        StudyError: they were scored with different settings.
    """
    contents = [json.loads(file.read_text()) for file in files]
    # Paths differ between machines.
    settings = [{**content["settings"], "model": None, "data": None} for content in contents]
    for file, found in zip(files, settings):
        if found != settings[0]:
            raise StudyError(
                f"{file} and {files[0]} were scored with different settings. Score both again with the same --samples "
                "and installation."
            )
    return [{float(temperature): table for temperature, table in content["scores"].items()} for content in contents]


def logged(runs: Sequence[Run], keys: Sequence[str]) -> float | None:
    """Mean of ``keys`` over the last steps of ``runs``; None where they are not logged."""
    series = [run.series(key)[1][-LAST_STEPS:] for run in runs for key in keys]
    values = [statistics.fmean(values) for values in series if values]
    return statistics.fmean(values) if values else None


def difference_of(found: Accuracy) -> str:
    """Difference in points to what ``found`` is compared with, and its standard error."""
    return f"{100 * found.difference:+.1f} ± {100 * found.difference_error:.1f}"


def table(rows: Sequence[Row], trained: Sequence[Trained], noise: Mapping[float, Noise]) -> list[list[str]]:
    """Header, one line per precision, and the line of BF16's two seeds."""
    temperatures = list(rows[0].accuracies)
    header = ["precision", "seeds"]
    for temperature in temperatures:
        name = temperature_name(temperature)
        header += [f"accuracy, {name}", f"Δ to BF16, {name}", f"noise, {name}", f"verdict, {name}"]
    header += [name for name, _, _ in LOGGED]
    body = [header]
    for row in rows:
        runs = [entry.run for entry in trained if entry.precision == row.precision and entry.run is not None]
        line = [row.precision, str(row.seeds) if row.seeds else ""]
        for temperature in temperatures:
            found = row.accuracies[temperature]
            line.append(f"{found.mean:.1%} ± {found.error:.1%}")
            if found.difference is None:
                line += ["", "", ""]
                continue
            line.append(difference_of(found))
            line.append(f"{100 * noise[temperature].bound(found):.1f}")
            line.append(noise[temperature].verdict(found, row.seeds) if row.seeds else "")
        values = [logged(runs, keys) for _, keys, _ in LOGGED]
        line += ["" if value is None else format(value, form) for value, (_, _, form) in zip(values, LOGGED)]
        body.append(line)
    first = [entry.run for entry in trained if entry.precision == next(row.precision for row in rows if row.seeds)]
    line = ["between BF16's seeds", str(len(first))]
    for temperature in temperatures:
        seeds = noise[temperature].seeds
        line += ["" if seeds is None else f"{100 * seeds:.1f} points", "", "", ""]
    for _, keys, form in LOGGED:
        values = [value for run in first if (value := logged([run], keys)) is not None]
        line.append(format(max(values) - min(values), form) if len(values) > 1 else "")
    return [*body, line]


def as_html(body: Sequence[Sequence[str]], caption: str) -> str:
    """The table for the page."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in body[0])
    rest = "".join(
        f"<tr><th>{html.escape(line[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line[1:])}</tr>"
        for line in body[1:]
    )
    below = f"<p class='absent'>{html.escape(caption)}</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rest}</tbody></table>{below}"


def difference_figure(rows: Sequence[Row], noise: Noise) -> Figure:
    """Difference of each precision to BF16 at the temperature that decides, in front of what it must exceed."""

    def draw(axes, runs: Sequence[Run]) -> bool:
        shown = [(row, found) for row in rows if (found := row.accuracies[PRIMARY]).difference is not None]
        for i, (row, found) in enumerate(shown):
            if row.seeds and not noise.verdict(found, row.seeds).startswith("no verdict"):
                bound = 100 * noise.bound(found)
                axes.barh(i, 2 * bound, 0.7, -bound, color=NEUTRAL, alpha=0.35)
            axes.errorbar(
                100 * found.difference, i, xerr=100 * found.difference_error, fmt="o", color=PALETTE[0], capsize=3
            )
        axes.axvline(0.0, color=INK, lw=0.8)
        axes.set_yticks(range(len(shown)), [row.precision for row, _ in shown])
        axes.invert_yaxis()
        axes.set_xlabel("points of accuracy to BF16, ± one standard error")
        return bool(shown)

    return Figure(
        "difference",
        "Difference to BF16 at temperature 1",
        "Paired by problem. Grey: what a difference must exceed, twice its standard error, the difference of BF16's "
        "seeds, and what another start of the engine changes; not drawn where there is no verdict.",
        draw,
    )


def pair_differences(trained: Sequence[Trained]) -> dict[str, str]:
    """``precision - other`` -> difference at the temperature that decides, for each of ``PAIRS`` with scores."""
    found = {}
    for precision, other in PAIRS:
        members = [entry for label in (other, precision) for entry in trained if entry.precision == label]
        if {entry.precision for entry in members} == {precision, other}:
            found[f"{precision} - {other}"] = difference_of(summarise(members)[1].accuracies[PRIMARY])
    return found


def accuracy_of(entry: Trained) -> str:
    """Accuracy of one training at the temperature that decides."""
    return f"{statistics.fmean(map(statistics.fmean, entry.scores[PRIMARY])):.2%}"


def over_the_run(run: Run) -> dict[str, object]:
    """Rollouts of ``run``, and mean, smallest and largest value of each logged figure over all of them."""
    found: dict[str, object] = {"rollouts": max((step for step, _ in run.records), default=0)}
    for name, keys, _ in LOGGED:
        if values := [value for key in keys for value in run.series(key)[1]]:
            found[name] = {"mean": statistics.fmean(values), "smallest": min(values), "largest": max(values)}
    return found


def caption_of(rollouts: int | None, left_out: Sequence[str], pairs: Mapping[str, str]) -> str:
    """The caption below the table."""
    weights = f"weights after {rollouts} rollouts" if rollouts else "final weights"
    absent = f" Without a score: {', '.join(left_out)}." if left_out else ""
    beside = "; ".join(f"{pair} {difference}" for pair, difference in pairs.items())
    return (
        f"Accuracy: {weights} on the test split in one BF16 engine or several like it, ± one standard error over the "
        f"problems; Δ is paired by problem. Other figures: means over the last {LAST_STEPS} steps and the seeds. "
        "Clipped and truncated: shares of response tokens, by sign of advantage."
        f"{f' Paired with each other, T=1: {beside}.' if beside else ''}{absent}"
    )


def metrics_of(run: StudyRun, rollouts: int | None) -> Run:
    """What ``run`` has logged, up to ``rollouts``; nothing of an attempt that was stopped before its first step."""
    records = []
    for step, data in records_of(run):
        if step <= (rollouts or math.inf):
            bounds = {other: data[key] for key, other in _BOUND_IN_THE_LOSS.items() if key in data}
            records.append((step, data | bounds))
    *earlier, build = builds_of(run) or [None]
    facts: dict = {"earlier_builds": earlier, "build": build}
    if run.paths.facts.is_file():
        facts = json.loads(run.paths.facts.read_text())
    return Run(run.name, records, facts, run.label)


def write_study(out: Path, rollouts: int | None = None, across_builds: bool = False) -> Path:
    """Write the page of all runs below ``out`` that have logs and scores; returns its path.

    Args:
        out: folder of the study.
        rollouts: use the scores after that many (``evaluate --rollouts``) and the logs up to there; the page is
            ``study-<rollouts>`` instead of ``study``.
        across_builds: allow trainings, or scores, of several builds; the page says so.

    Raises:
        StudyError: there is no score of the precision that the others are compared with.
        ToolError: trainings or scores come from several builds, and ``across_builds`` is not set.
    """
    folder, first = folder_of(out, rollouts), control()
    stem = f"study-{rollouts}" if rollouts else "study"
    runs = runs_in(out)
    scored, before = [run for run in runs if file_of(folder, run.name).is_file()], before_files(folder)
    if not before or not any(run.label == first for run in scored):
        remedy = f"Run `python3 -m benchmarks.study.evaluate --out {out}`"
        if rollouts:
            remedy += f" with --rollouts {rollouts}"
        elif lengths := sorted(other.name.removeprefix("evaluation-") for other in out.glob("evaluation-*")):
            remedy = f"Plot with --rollouts {' or '.join(lengths)}, which have scores"
        raise StudyError(f"{folder} has no score of {first}. {remedy}.")

    logs = {run.name: metrics_of(run, rollouts) for run in runs}
    shown = [logs[run.name] for run in (scored if rollouts else runs) if logs[run.name].records]
    if not shown:
        raise StudyError(
            f"{folder_of_runs(out)} has no metrics of the scored runs. Copy the folders of these runs into it."
        )
    files = [*before, *(file_of(folder, run.name) for run in scored)]
    scores, by = read_scores(files), [json.loads(file.read_text()).get("build") for file in files]
    starts = scores[: len(before)]
    trained = [Trained(BEFORE, None, starts[0], scored_by=by[0])]
    trained += [
        Trained(run.label, run.seed, found, logs[run.name], build)
        for run, found, build in zip(scored, scores[len(before) :], by[len(before) :])
    ]
    builds = build_notes(trained, across_builds)
    rows = summarise(trained)
    bf16 = next(row for row in rows if row.precision == first)
    seeds = [entry.scores for entry in trained if entry.precision == first]
    noise = {temperature: noise_of(bf16, seeds, starts, temperature) for temperature in bf16.accuracies}
    body = table(rows, trained, noise)
    markdown = [f"| {' | '.join(line)} |" for line in (body[0], ["---"] * len(body[0]), *body[1:])]
    pairs = pair_differences(trained)
    caption = caption_of(rollouts, [run.name for run in every_run(out) if run not in scored], pairs)
    (out / f"{stem}.md").write_text("\n".join([*markdown, "", caption, "", *builds, ""]))
    contents = {
        "builds": builds,
        "table": [dict(zip(body[0], line)) for line in body[1:]],
        "pairs at temperature 1": pairs,
        "trainings at temperature 1": {
            f"{entry.precision}-seed{entry.seed}": accuracy_of(entry) for entry in trained[1:]
        },
        "runs": {run.name: over_the_run(run) for run in logs.values() if run.records},
    }
    (out / f"{stem}.json").write_text(json.dumps(contents, indent=1))
    return write_report(
        shown,
        out / f"{stem}.html",
        "The study" + (f", after {rollouts} rollouts" if rollouts else ""),
        (difference_figure(rows, noise[PRIMARY]), *FIGURES, *STUDY_FIGURES),
        as_html(body, caption),
        across_builds,
    )


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--rollouts", type=int, help="as given to benchmarks.study.evaluate")
    parser.add_argument("--across-builds", action="store_true", help="compare runs of several builds of the package")
    given = parser.parse_args()
    try:
        print(write_study(given.out, given.rollouts, given.across_builds))
    except ToolError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

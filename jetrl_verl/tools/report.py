# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One HTML page with pictures and a table for one or several verl runs, from the JSONL of verl's ``file`` tracker."""

import html
import io
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import matplotlib

matplotlib.use("Agg")  # before pyplot: reports are written on machines without a display
import matplotlib.pyplot as plt

from jetrl_verl.inputs import UserError, load_json, reading

REWARD = "critic/score/mean"
MISMATCH = "rollout_corr/k3_kl"
STEP_SECONDS = "timing_s/step"
_ACCURACY = re.compile(r"val-core/(.+)/acc/mean@(\d+)")

DASHES = ("-", "--", ":", "-.")
INK = "#33383f"  # text and axes; the page replaces it with `currentColor`, for light and dark mode
STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text and takes the page's colour
}


@dataclass
class Run:
    """Metrics of one run per step, as logged, and facts for the table.

    Runs with the same ``group`` repeat one experiment with other seeds; without a group, a run is its own.
    """

    name: str
    records: list[tuple[int, dict]]
    facts: dict = field(default_factory=dict)
    group: str = ""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of ``key``, finite values only (verl writes NaN as null)."""
        points = {step: float(data[key]) for step, data in self.records if data.get(key) is not None}
        points = {step: value for step, value in points.items() if math.isfinite(value)}
        return list(points), list(points.values())

    def mean(self, key: str) -> float | None:
        """Mean of ``key`` over the run, or None."""
        values = self.series(key)[1]
        return statistics.fmean(values) if values else None


def accuracy_keys(runs: Iterable[Run]) -> dict[str, str]:
    """Name -> key of every held-out accuracy of ``runs``, one per validation set.

    verl's key holds data source and number of responses. The name is the source, with the number where numbers differ.
    """
    keys = sorted({key for run in runs for _, data in run.records for key in data})
    matches = [match for key in keys if (match := _ACCURACY.fullmatch(key))]
    same_number = len({match[2] for match in matches}) == 1
    return {match[1] if same_number else f"{match[1]} mean@{match[2]}": match[0] for match in matches}


def load_run(folder: Path, name: str | None = None) -> Run:
    """Metrics of the run in ``folder`` and, where it exists, its ``run.json``.

    Raises ``UserError`` without metrics and for those of :func:`read_metrics`.
    """
    steps = read_metrics(folder)
    if not steps:
        raise UserError(f"the run in {folder} logged nothing to {folder / 'metrics.jsonl'}; run it again")
    facts_file = folder / "run.json"
    facts = {}
    if facts_file.exists():
        with reading(facts_file, "record of a run", "Delete the folder and run again"):
            facts = load_json(facts_file)
    return Run(name or facts.get("precision") or folder.name, sorted(steps.items()), facts)


def read_metrics(folder: Path) -> dict[int, dict]:
    """Step -> metrics of ``metrics.jsonl``, after those of earlier attempts (``metrics-*.jsonl``).

    For each step the last value of a metric counts. A last line that an interruption cut off is dropped; ``UserError``
    for any other that is damaged.
    """
    steps: dict[int, dict] = {}
    for path in (*sorted(folder.glob("metrics-*.jsonl")), folder / "metrics.jsonl"):
        lines: list[str] = []
        if path.exists():
            with reading(path, "file of metrics", "Delete the folder and run again"):
                lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                steps[record["step"]] = {**steps.get(record["step"], {}), **record["data"]}
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    message = f"line {number} of {path} is not a metrics record; delete the folder and run again"
                    raise UserError(message) from None
    return steps


def write_report(
    runs: Sequence[Run], path: Path, title: str = "Jet-RL on verl", extra: Sequence[Run] = (), summary: str = ""
) -> Path:
    """Write the page to ``path`` and its picture next to it as PNG; returns ``path``.

    ``extra`` is drawn in the panel of the mismatch, ``summary`` is HTML above the picture. Raises ``ValueError`` if
    there is no run or two have one name.
    """
    if not runs or len({run.name for run in runs}) < len(runs):
        raise ValueError("a report needs at least one run, and a name of its own for each")
    figure, missing = draw(runs, extra)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")
    svg = io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    page = Template(Path(__file__).with_suffix(".html").read_text()).substitute(
        title=html.escape(title),
        summary=summary,
        figure=svg.getvalue()[svg.getvalue().index("<svg") :].replace(INK, "currentColor"),
        missing=f"<p>Not logged by these runs: {html.escape(', '.join(missing))}.</p>" if missing else "",
        facts=_facts_table(runs),
    )
    path.write_text(page)
    return path


# --- pictures --------------------------------------------------------------------------------------------------------


PANELS = {
    "reward": ("Reward", "mean score", REWARD),
    "accuracy": ("Held-out accuracy", "share of correct answers", ""),
    "mismatch": ("Mismatch of rollout and trainer", "k3 KL (nat per token)", MISMATCH),
    "entropy": ("Entropy", "nat per token", "actor/entropy"),
    "clip_fraction": ("Clip fraction", "share of tokens", "actor/pg_clipfrac"),
    "response_length": ("Response length", "mean tokens", "response_length/mean"),
    "seconds": ("Seconds per step", "seconds", STEP_SECONDS),
}
"""Name -> title, label of the y axis, metric; the accuracy has one per validation set."""


def draw(
    runs: Sequence[Run], extra: Sequence[Run] = (), panels: Sequence[str] = tuple(PANELS)
) -> tuple[plt.Figure, list[str]]:
    """One figure with those of ``panels`` whose metric some run logged, and the titles of the others.

    Each group of runs has a colour. ``extra`` joins the panel of the mismatch. The caller closes the figure.
    """
    keys = {name: accuracy_keys(runs) if name == "accuracy" else {"": PANELS[name][2]} for name in panels}
    lines = {name: _lines(runs, keys[name], extra if name == "mismatch" else ()) for name in panels}
    shown = [name for name in panels if lines[name]]
    rows = max(1, math.ceil(len(shown) / 2))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, 2, figsize=(12, 3.4 * rows), layout="constrained", squeeze=False)
        for name, axes in zip(shown, grid.flat):
            for line in lines[name]:
                _draw_line(axes, **line)
            title, ylabel, _ = PANELS[name]
            axes.set(title=title, xlabel="step", ylabel=ylabel)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if name == "mismatch":
                _show_zero(axes)
            if name == "mismatch" or len(lines[name]) > 1:
                axes.legend()
        for axes in grid.flat[len(shown) :]:
            axes.set_axis_off()
    return figure, [PANELS[name][0] for name in panels if name not in shown]


def _lines(runs: Sequence[Run], keys: Mapping[str, str], extra: Sequence[Run] = ()) -> list[dict]:
    """Arguments of :func:`_draw_line`: a colour per group of runs, a dash per key (name -> key)."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group or run.name, []).append(run)
    lines = []
    for i, (group, members) in enumerate(groups.items()):
        for j, (name, key) in enumerate(keys.items()):
            curves = [dict(zip(*run.series(key))) for run in members if run.series(key)[0]]
            style = {"label": f"{group}, {name}" if len(keys) > 1 else group, "color": f"C{i}"}
            lines += [{"curves": curves, "linestyle": DASHES[j % len(DASHES)], **style}] if curves else []
    for i, run in enumerate(extra, start=len(groups)):
        lines.append({"curves": [dict(zip(*run.series(MISMATCH)))], "label": run.name, "color": f"C{i}"})
    return lines


def _draw_line(axes: plt.Axes, curves: Sequence[Mapping[int, float]], label: str, **style) -> None:
    """One curve (step -> value), or the mean of several seeds, which are thin below it."""
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.keys(), curve.values(), lw=0.8, alpha=0.4, **style)
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
    axes.plot(steps, means, label=label, marker="o" if len(steps) < 8 else None, markersize=4, **style)


def _show_zero(axes: plt.Axes) -> None:
    """A logarithmic axis that ends in a linear piece down to 0, so that a mismatch of exactly 0 is a visible line."""
    values = [abs(value) for line in axes.lines for value in line.get_ydata()]
    smallest = min((value for value in values if value), default=1e-6)
    threshold = 10.0 ** math.floor(math.log10(smallest))
    axes.set_yscale("symlog", linthresh=threshold)
    axes.set_ylim(min(axes.get_ylim()[0], -0.2 * threshold), 3 * max(*values, threshold))
    for line in axes.lines:
        if line.get_alpha() is None and not any(line.get_ydata()):
            line.set_label(f"{line.get_label()}: exactly 0")


# --- table -----------------------------------------------------------------------------------------------------------


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row and first column are names."""
    head, *body = [
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    ]
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _facts_table(runs: Sequence[Run]) -> str:
    """One row per measurement or fact, one column per run."""
    keys = accuracy_keys(runs)
    facts = [{n: v if isinstance(v, str) else json.dumps(v) for n, v in run.facts.items()} for run in runs]
    columns = [{**_measurements(run, keys), **column} for run, column in zip(runs, facts)]
    names = dict.fromkeys(name for column in columns for name in column)
    return html_table([["", *(run.name for run in runs)], *([n, *(c.get(n, "–") for c in columns)] for n in names)])


def _measurements(run: Run, accuracies: Mapping[str, str]) -> dict[str, str]:
    """First and last accuracy and reward, and means: of the mismatch, the ``jetrl/`` metrics, the seconds of phases."""
    names = {f"held-out accuracy, {name}": key for name, key in accuracies.items()} | {"reward": REWARD}
    rows = {}
    for name, key in names.items():
        if points := list(zip(*run.series(key))):
            rows[name] = " → ".join(f"{value:.3f} (step {step})" for step, value in (points[0], points[-1]))
    logged = sorted({key for _, data in run.records for key in data})
    # A timer with another / is nested in a phase.
    means = [key for key in logged if "jetrl/" in key or (key.startswith("timing_s/") and key.count("/") == 1)]
    rows |= {f"{key}, mean": f"{mean:.4g}" for key in (MISMATCH, *means) if (mean := run.mean(key)) is not None}
    return rows

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One HTML page with pictures and a table for one or several verl runs, from the JSONL of verl's ``file`` tracker."""

import html
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: reports are written on machines without a display
import matplotlib.pyplot as plt

REWARD = "critic/score/mean"
MISMATCH = "rollout_corr/k3_kl"
STEP_SECONDS = "timing_s/step"
VALIDATION = "val-core/"
ACCURACY_SUFFIX = "/acc/mean@"

# Mid-tone colours with contrast on white and on near-black, in an order that colour-blind readers can tell apart.
PALETTE = (
    "#3b82c4", "#e07b39", "#2aa37a", "#b565c4", "#c39b1f", "#d1495b", "#5aa9b8", "#8d8d4f",
    "#a0724c", "#d6709a", "#7478dd", "#7fa03a",
)  # fmt: skip
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
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text and takes the page's colour
}
_PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
_TEMPLATE = Path(__file__).with_name("report.html")


class Series(NamedTuple):
    """A curve from outside the metrics of a run, for the panel of the mismatch."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


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
        points = [(step, float(data[key])) for step, data in self.records if _is_finite(data.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    def mean(self, key: str) -> float | None:
        """Mean of ``key`` over the run, or None."""
        values = self.series(key)[1]
        return statistics.fmean(values) if values else None


def accuracy_keys(runs: Iterable[Run]) -> dict[str, str]:
    """Name -> key of every held-out accuracy of ``runs``, one per validation set.

    verl's key holds data source and number of responses. The name is the source, with the number where numbers differ.
    """
    keys = sorted({key for run in runs for _, data in run.records for key in data})
    parts = {
        key: key.removeprefix(VALIDATION).rsplit(ACCURACY_SUFFIX, 1)
        for key in keys
        if key.startswith(VALIDATION) and ACCURACY_SUFFIX in key
    }
    same_number = len({number for _, number in parts.values()}) == 1
    return {source if same_number else f"{source} mean@{number}": key for key, (source, number) in parts.items()}


def load_run(folder: Path, name: str | None = None) -> Run:
    """Read ``metrics.jsonl`` and, where it exists, ``run.json`` of ``folder``.

    ``metrics-*.jsonl`` of earlier attempts come first; for each step the last value of a metric counts. A last line
    that an interruption cut off is dropped. Raises ``ValueError`` without metrics or if another line is damaged.
    """
    path = folder / "metrics.jsonl"
    steps: dict[int, dict] = {}
    for file in (*sorted(folder.glob("metrics-*.jsonl")), path):
        for step, data in _read_records(file) if file.is_file() else ():
            steps[step] = steps.get(step, {}) | data
    if not steps:
        raise ValueError(f"the run in {folder} logged nothing to {path}")
    facts_file = folder / "run.json"
    facts = json.loads(facts_file.read_text()) if facts_file.is_file() else {}
    return Run(name or facts.get("precision") or folder.name, sorted(steps.items()), facts)


def _read_records(path: Path) -> list[tuple[int, dict]]:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append((int(record["step"]), dict(record["data"])))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines) or number == 1:
                message = f"line {number} of {path} is not a metrics record; delete the folder and run again"
                raise ValueError(message) from error
    return records


def write_report(
    runs: Sequence[Run], path: Path, title: str = "Jet-RL on verl", extra: Sequence[Series] = (), summary: str = ""
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
    page = Template(_TEMPLATE.read_text()).substitute(
        title=html.escape(title),
        summary=summary,
        figure=svg.getvalue()[svg.getvalue().index("<svg") :].replace(INK, "currentColor"),
        missing=f"<p>Not logged by these runs: {html.escape(', '.join(missing))}.</p>" if missing else "",
        facts=_facts_table(runs),
    )
    path.write_text(page)
    return path


# --- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Curves of one label: several are seeds, drawn thin below their mean."""

    label: str
    curves: list[tuple[Sequence[int], Sequence[float]]]
    color: str
    dash: str = "-"

    def draw(self, axes: plt.Axes) -> None:
        points = [dict(zip(*curve)) for curve in self.curves]
        if len(points) > 1:
            for curve in self.curves:
                axes.plot(*curve, color=self.color, linestyle=self.dash, lw=0.8, alpha=0.4)
        steps = sorted(set.intersection(*(set(curve) for curve in points)))
        means = [statistics.fmean(curve[step] for curve in points) for step in steps]
        style = {"color": self.color, "linestyle": self.dash, "marker": "o" if len(steps) < 8 else None}
        axes.plot(steps, means, label=self.label, markersize=4, **style)


PANELS = {
    "reward": ("Reward", "mean score", REWARD),
    "accuracy": ("Held-out accuracy", "share of correct answers", VALIDATION),
    "mismatch": ("Mismatch of rollout and trainer", "k3 KL (nat per token)", MISMATCH),
    "entropy": ("Entropy", "nat per token", "actor/entropy"),
    "clip_fraction": ("Clip fraction", "share of tokens", "actor/pg_clipfrac"),
    "response_length": ("Response length", "mean tokens", "response_length/mean"),
    "seconds": ("Seconds per step", "seconds, without validation", STEP_SECONDS),
    "phases": ("Seconds per step by phase", "", STEP_SECONDS),
}
"""Name -> title, label of the y axis, metric."""


def draw(
    runs: Sequence[Run], extra: Sequence[Series] = (), panels: Sequence[str] = tuple(PANELS)
) -> tuple[plt.Figure, list[str]]:
    """One figure with those of ``panels`` whose metric some run logged, and the titles of the others.

    Each group of runs has a colour. ``extra`` joins the panel of the mismatch. The caller closes the figure.
    """
    lines = {
        name: _lines(
            runs,
            accuracy_keys(runs) if name == "accuracy" else {"": PANELS[name][2]},
            extra if name == "mismatch" else (),
        )
        for name in panels
    }
    shown = [name for name in panels if lines[name]]
    rows = max(1, math.ceil(len(shown) / 2))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, 2, figsize=(12, 3.4 * rows), layout="constrained", squeeze=False)
        for name, axes in zip(shown, grid.flat):
            title, ylabel, _ = PANELS[name]
            if name == "phases":
                _draw_phases(axes, by_group(runs))
            else:
                for line in lines[name]:
                    line.draw(axes)
                axes.set(xlabel="step", ylabel=ylabel)
                axes.xaxis.get_major_locator().set_params(integer=True)
            if name == "mismatch":
                _show_zero(axes)
            if name == "mismatch" or len(lines[name]) > 1:
                axes.legend()
            axes.set_title(title)
        for axes in grid.flat[len(shown) :]:
            axes.set_axis_off()
    return figure, [PANELS[name][0] for name in panels if name not in shown]


def by_group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by group, in the order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group or run.name, []).append(run)
    return groups


def _lines(runs: Sequence[Run], keys: Mapping[str, str], extra: Sequence[Series] = ()) -> list[_Line]:
    """A colour per group, a dash per key (name -> key)."""
    groups = by_group(runs)
    lines = []
    for i, (group, members) in enumerate(groups.items()):
        for j, (name, key) in enumerate(keys.items()):
            curves = [curve for run in members if (curve := run.series(key))[0]]
            if curves:
                label = f"{group}, {name}" if len(keys) > 1 else group
                lines.append(_Line(label, curves, PALETTE[i % len(PALETTE)], DASHES[j % len(DASHES)]))
    for i, series in enumerate(extra, start=len(groups)):
        lines.append(_Line(series.name, [(series.steps, series.values)], PALETTE[i % len(PALETTE)]))
    return lines


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


def _draw_phases(axes: plt.Axes, groups: Mapping[str, Sequence[Run]]) -> None:
    """Stacked bars: the mean seconds of each phase, one bar per group."""
    left = dict.fromkeys(groups, 0.0)
    steps = {
        group: [phase_seconds(data) for run in runs for _, data in run.records if _is_finite(data.get(STEP_SECONDS))]
        for group, runs in groups.items()
    }
    names = {name for group in steps.values() for step in group for name in step}
    for i, name in enumerate(sorted(names, key=lambda name: (_PHASES.index(name) if name in _PHASES else 99, name))):
        widths = {g: statistics.fmean(s.get(name, 0.0) for s in step) if step else 0.0 for g, step in steps.items()}
        axes.barh(list(groups), widths.values(), left=left.values(), color=PALETTE[i % len(PALETTE)], label=name)
        left = {group: left[group] + widths[group] for group in groups}
    axes.invert_yaxis()
    axes.set_xlabel("seconds, mean over steps, without validation")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def phase_seconds(data: Mapping) -> dict[str, float]:
    """Seconds per phase of one step. Nested timers (with another ``/``) lie inside a phase, ``testing`` outside."""
    prefix = "timing_s/"
    names = {key.removeprefix(prefix): key for key in data if key.startswith(prefix)}
    seconds = {name: float(data[key]) for name, key in names.items() if "/" not in name and _is_finite(data[key])}
    total = seconds.pop("step", 0.0)
    seconds.pop("testing", None)
    return seconds | {"other": max(0.0, total - sum(seconds.values()))}


# --- table -----------------------------------------------------------------------------------------------------------


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _facts_table(runs: Sequence[Run]) -> str:
    """One row per measurement or fact, one column per run."""
    keys = accuracy_keys(runs)
    columns = [{**_measurements(run, keys), **_flatten(run.facts)} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return html_table(["", *(run.name for run in runs)], [[n, *(c.get(n, "–") for c in columns)] for n in names])


def _measurements(run: Run, accuracies: Mapping[str, str]) -> dict[str, str]:
    """First and last accuracy and reward, and means over the run, among them of every ``jetrl/`` metric."""
    ends = {f"held-out accuracy, {name}": (key, ".1%") for name, key in accuracies.items()} | {
        "reward": (REWARD, ".3f")
    }
    rows = {}
    for name, (key, form) in ends.items():
        if points := list(zip(*run.series(key))):
            rows[name] = " → ".join(
                f"{value:{form}} (step {step})" for step, value in dict.fromkeys((points[0], points[-1]))
            )
    jetrl_keys = sorted({key for _, data in run.records for key in data if "jetrl/" in key})
    for key in (MISMATCH, *jetrl_keys):
        if (mean := run.mean(key)) is not None:
            rows[f"{key.removeprefix('actor/')}, mean"] = f"{mean:.4g}"
    if seconds := run.series(STEP_SECONDS)[1]:
        rows["seconds per step, median"] = f"{statistics.median(seconds):.1f}"
    return rows


def _flatten(facts: Mapping, prefix: str = "") -> dict[str, str]:
    """Nested facts as ``outer.inner``."""
    flat = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = f"{value:.4g}" if isinstance(value, float) else str(value)
    return flat


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

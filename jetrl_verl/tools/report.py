# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One HTML page for one or more verl runs: what was learnt, how far rollout and trainer differ, where the time went.

A run is a folder with verl's ``metrics.jsonl`` (its ``file`` logger) and an optional ``run.json`` of facts. The page
needs no other file: figures are inline SVG whose text takes the page's colour, readable in light and dark mode. The
same figures are written beside it as PNG. With one run, each metric gets a colour; with several, each group of runs
does. Runs of one group (seeds) are drawn faintly behind their mean. Long runs of several groups are drawn as a rolling
mean over steps, since the noise of single steps would hide the differences between groups.

A figure appears only if some run has its metric. The page names the absent ones, so a renamed metric is noticed.
"""

import html
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import matplotlib

matplotlib.use("Agg")  # before pyplot: reports are written on machines without a display
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jetrl_verl.tools.provenance import builds_in, builds_note

_TEMPLATE = Path(__file__).with_name("report.html")

# Mid-tone colours that keep their contrast on white and on near-black, in an order that colour-blind readers can tell.
PALETTE = (
    "#3b82c4", "#e07b39", "#2aa37a", "#b565c4", "#c39b1f", "#d1495b", "#5aa9b8", "#8d8d4f",
    "#a0724c", "#d6709a", "#7478dd", "#7fa03a",
)  # fmt: skip
NEUTRAL = "#8a8f98"  # of rows without a trained run
DASHES = ("-", "--", ":")  # of metrics that share a group's colour
INK = "#33383f"  # text and axes; becomes `currentColor` in the page

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text: smaller, selectable, and it can take the page's colour
}

ROLLING = 10
"""Width in steps of the rolling mean of several groups; used if they have four times as many steps."""

REWARD = "critic/score/mean"
MISMATCH = "rollout_corr/k3_kl"
STEP_SECONDS = "timing_s/step"
VALIDATION = "val-core/"
ACCURACY_SUFFIX = "/acc/mean@"


@dataclass
class Run:
    """Metrics of one run in the order they were logged, and facts about it for the table.

    Runs with the same ``group`` repeat one experiment, for example seeds of one precision. A run without one is a group
    by itself.
    """

    name: str
    records: list[tuple[int, dict]]
    facts: dict = field(default_factory=dict)
    group: str = ""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of ``key``, finite values only (verl writes NaN as null)."""
        points = [(step, data[key]) for step, data in self.records if _is_finite(data.get(key))]
        return [step for step, _ in points], [float(value) for _, value in points]

    def mean(self, key: str) -> float | None:
        """Mean of ``key`` over the run, or None."""
        values = self.series(key)[1]
        return statistics.fmean(values) if values else None


def accuracy_keys(runs: Iterable[Run]) -> dict[str, str]:
    """Name -> key of every held-out accuracy of ``runs``, one per validation set.

    verl puts data source and number of responses into the key; the name is the source, with the number where numbers
    differ.
    """
    keys = sorted({key for run in runs for _, data in run.records for key in data})
    parts = {key: key.removeprefix(VALIDATION).rsplit(ACCURACY_SUFFIX, 1) for key in keys if _is_accuracy(key)}
    alike = len({responses for _, responses in parts.values()}) == 1
    return {source if alike else f"{source} mean@{responses}": key for key, (source, responses) in parts.items()}


def _is_accuracy(key: str) -> bool:
    return key.startswith(VALIDATION) and ACCURACY_SUFFIX in key


def load_run(folder: Path, name: str | None = None) -> Run:
    """Read ``metrics.jsonl`` and ``run.json`` of ``folder``.

    A last line that is cut off, as an interrupted run leaves it, is dropped. Raises ``ValueError`` if there are no
    metrics or a line in the middle is damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; the run in {folder} logged nothing")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append((int(record["step"]), dict(record["data"])))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and records:
                break
            raise ValueError(
                f"line {number} of {path} is not a metrics record; delete the folder and run again"
            ) from error
    if not records:
        raise ValueError(f"{path} is empty; the run in {folder} logged nothing")
    facts_path = folder / "run.json"
    facts = json.loads(facts_path.read_text()) if facts_path.is_file() else {}
    return Run(name or facts.get("precision") or folder.name, records, facts)


def write_report(
    runs: Sequence[Run],
    path: Path,
    title: str = "Jet-RL on verl",
    figures: "Sequence[Figure] | None" = None,
    summary: str | None = None,
    across_builds: bool = False,
) -> Path:
    """Write the page to ``path`` and every figure to ``<path's stem>_<figure>.png`` beside it; returns ``path``.

    Args:
        runs: what is drawn, in the order of the legend.
        path: the page.
        title: its heading.
        figures: what to draw; ``FIGURES`` if None.
        summary: HTML above the figures; tiles of each run's main figures if None.
        across_builds: draw runs of several builds beside each other, and say so on the page.

    Raises:
        ValueError: ``runs`` is empty or two runs share a name.
        ToolError: the runs are of several builds, and ``across_builds`` is not set.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("two runs of the report have the same name; give each its own")
    note = builds_note({run.name: builds_in(run.facts) for run in runs}, across_builds)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawings, absent = [], []
    for figure in FIGURES if figures is None else figures:
        with plt.rc_context(STYLE):
            canvas, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
            drawn = figure.draw(axes, runs)
            if drawn:
                axes.set_title(figure.title)
                canvas.savefig(path.with_name(f"{path.stem}_{figure.name}.png"), dpi=160, facecolor="white")
                drawings.append(_figure_html(figure, canvas, runs))
            else:
                absent.append(figure.title.lower())
            plt.close(canvas)
    page = Template(_TEMPLATE.read_text()).substitute(
        title=html.escape(title),
        summary="\n".join(_summary_html(run, runs) for run in runs) if summary is None else summary,
        figures="\n".join(drawings),
        absent=f"<p class='absent'>Not logged by these runs: {html.escape(', '.join(absent))}.</p>" if absent else "",
        facts=f"{_facts_html(runs)}<p class='absent'>{html.escape(note)}</p>",
    )
    path.write_text(page)
    return path


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of the report. ``draw(axes, runs)`` returns whether there was anything to draw.

    A caption that depends on what was logged is a function of the runs.
    """

    name: str
    title: str
    caption: str | Callable[[Sequence[Run]], str]
    draw: Callable[[plt.Axes, Sequence[Run]], bool]


def by_group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by group, in the order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group or run.name, []).append(run)
    return groups


def rolling_mean(values: Sequence[float], width: int) -> list[float]:
    """Means of ``width`` values around each one, fewer at both ends; if even, one more before it than after."""
    before = width // 2
    return [statistics.fmean(values[max(0, i - before) : i + width - before]) for i in range(len(values))]


def _plot(
    axes: plt.Axes, curves: Sequence[tuple[list[int], list[float]]], width: int = 1, log: bool = False, **style
) -> bool:
    """One curve, or the mean of several, each of which is faint behind it; returns whether anything can be seen.

    Means come first: a log axis has no place for what is not positive then, and leaves a gap there.
    """

    def draw(steps: Sequence[int], values: Sequence[float], **style) -> bool:
        smooth = [math.nan if log and value <= 0 else value for value in rolling_mean(values, width)]
        axes.plot(steps, smooth, **style)
        return any(map(math.isfinite, smooth))

    curves = [(steps, values) for steps, values in curves if steps]
    if not curves:
        return False
    if len(curves) > 1:
        for steps, values in curves:
            draw(steps, values, color=style["color"], linestyle=style.get("linestyle", "-"), lw=0.8, alpha=0.4)
    seen = [dict(zip(*curve)) for curve in curves]
    steps = [step for step in curves[0][0] if all(step in values for values in seen)]
    return draw(steps, [statistics.fmean(values[step] for values in seen) for step in steps], **style)


def lines(*metrics: tuple[str, str], ylabel: str, log: bool = False, bottom: float | None = None):
    """A drawing function for lines over steps.

    ``metrics`` are (key, label). One group gets a colour per metric; several get a colour per group and a dash per
    metric. The legend names what a log axis cannot show; where nothing is above 0 the axis is linear.
    """

    def draw(axes: plt.Axes, runs: Sequence[Run]) -> bool:
        groups = by_group(runs)
        several = len(groups) > 1
        handles, widths, drawn, zeros = [], set(), set(), set()
        for i, (name, members) in enumerate(groups.items()):
            logged, unseen = 0, []
            for j, (key, label) in enumerate(metrics):
                curves = [curve for run in members if (curve := run.series(key))[0]]
                if not curves:
                    continue
                logged += 1
                shortest = min(len(steps) for steps, _ in curves)
                width = ROLLING if several and shortest >= 4 * ROLLING else 1
                style = {
                    "color": PALETTE[(i if several else j) % len(PALETTE)],
                    "linestyle": DASHES[j % len(DASHES)] if several else "-",
                    "marker": "o" if shortest < 8 else None,
                    "markersize": 4,
                }
                if not _plot(axes, curves, width, log, **style):
                    below = any(any(values) for _, values in curves)
                    unseen.append(label + (" not above 0" if below else " 0"))
                    zeros.update(step for steps, _ in curves for step in steps if not below)
                    continue
                widths.add(width)
                drawn.add(j)
                if not several:
                    handles.append(Line2D([], [], **style, label=label))
            if several and logged:
                words = ": 0" if unseen == [f"{label} 0" for _, label in metrics] else "".join(f", {w}" for w in unseen)
                handles.append(Line2D([], [], color=PALETTE[i % len(PALETTE)], label=name + words))
            elif unseen:
                handles.append(Line2D([], [], linestyle="", label=", ".join(unseen)))
        if several and len(metrics) > 1:
            kinds = [{"linestyle": DASHES[j % len(DASHES)], "label": metrics[j][1]} for j in sorted(drawn)]
            handles += [Line2D([], [], color=INK, lw=1.2, **kind) for kind in kinds]
        _finish(axes, f"{ylabel}, mean of {ROLLING} steps" if ROLLING in widths else ylabel)
        if several or len(handles) > 1 or not drawn:
            _legend(axes, handles)
        if log and drawn:
            axes.set_yscale("log")
        elif log and zeros:
            axes.plot(sorted(zeros), [0.0] * len(zeros), color=PALETTE[0])
            axes.set(ylim=(-0.5, 1), yticks=[0])
        if bottom is not None:
            axes.set_ylim(bottom=bottom)
        return bool(handles)

    return draw


def bars(*metrics: tuple[str, str], xlabel: str):
    """A drawing function for one bar per group and metric, its mean over all steps, with a dot for each of its runs.

    ``metrics`` are (key, label); for what is so rare or noisy that a line over steps shows nothing.
    """

    def draw(axes: plt.Axes, runs: Sequence[Run]) -> bool:
        groups = {
            name: members for name, members in by_group(runs).items()
            if any(run.mean(key) is not None for run in members for key, _ in metrics)
        }  # fmt: skip
        height = 0.8 / len(metrics)
        for j, (key, _) in enumerate(metrics):
            for i, members in enumerate(groups.values()):
                means = [mean for run in members if (mean := run.mean(key)) is not None]
                if means:
                    row = i + (j - (len(metrics) - 1) / 2) * height
                    axes.barh(row, statistics.fmean(means), 0.9 * height, color=PALETTE[j])
                    axes.plot(means, [row] * len(means), "o", color=INK, markersize=2.5)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
        axes.set_xlabel(xlabel)
        if len(metrics) > 1:
            _legend(axes, [Patch(color=PALETTE[j], label=label) for j, (_, label) in enumerate(metrics)])
        return bool(groups)

    return draw


def _draw_accuracy(axes: plt.Axes, runs: Sequence[Run]) -> bool:
    """A line per group and validation set: one group has a colour per set, several a colour each, a dash per set."""
    groups, keys = by_group(runs), accuracy_keys(runs)
    several = len(groups) > 1
    of_groups, of_sets = {}, {}
    for i, (group, members) in enumerate(groups.items()):
        for j, (name, key) in enumerate(keys.items()):
            colour = PALETTE[(i if several else j) % len(PALETTE)]
            kind = {"linestyle": DASHES[j % len(DASHES)] if several else "-", "marker": "os^D"[j % 4], "markersize": 5}
            if _plot(axes, [run.series(key) for run in members], color=colour, **kind):
                of_groups[group] = Line2D([], [], color=colour, label=group)
                of_sets[name] = Line2D([], [], color=INK if several else colour, label=name, **kind)
    if len(runs) == 1:
        for key in keys.values():
            points = list(zip(*runs[0].series(key)))
            for step, value in {*points[:1], *points[-1:]}:
                axes.annotate(f"{value:.0%}", (step, value), (0, 8), textcoords="offset points", ha="center")
    _finish(axes, "share of correct answers")
    handles = [handle for kind in (of_groups, of_sets) if len(kind) > 1 for handle in kind.values()]
    if handles:
        _legend(axes, handles)
    axes.set_ylim(0, 1.08)
    return bool(of_sets)


def _accuracy_caption(runs: Sequence[Run]) -> str:
    keys = accuracy_keys(runs).values()
    responses = sorted({int(key.rpartition(ACCURACY_SUFFIX)[2]) for key in keys})
    each = "one response each" if responses == [1] else f"{' or '.join(map(str, responses))} responses each"
    before = any(run.series(key)[0][:1] == [0] for run in runs for key in keys)
    return f"Problems the policy never trained on, {each}{'; step 0 is before training' if before else ''}."


def _draw_timings(axes: plt.Axes, runs: Sequence[Run]) -> bool:
    """Seconds of a step by phase: over the steps for one run, as means for several groups."""
    phases = _phases(runs)
    if not phases:
        return False
    colours = {phase: PALETTE[i % len(PALETTE)] for i, phase in enumerate(phases)}
    if len(runs) == 1:
        steps = runs[0].series(STEP_SECONDS)[0]
        by_step = {step: _phase_seconds(data) for step, data in runs[0].records if step in set(steps)}
        base = [0.0] * len(steps)
        for phase in phases:
            heights = [by_step[step].get(phase, 0.0) for step in steps]
            axes.bar(steps, heights, width=0.85, bottom=base, color=colours[phase], label=phase)
            base = [low + height for low, height in zip(base, heights)]
        _finish(axes, "seconds")
    else:
        groups = by_group(runs)
        base = [0.0] * len(groups)
        for phase in phases:
            widths = []
            for members in groups.values():
                records = [data for run in members for _, data in run.records if STEP_SECONDS in data]
                seconds = [_phase_seconds(data).get(phase, 0.0) for data in records]
                widths.append(statistics.fmean(seconds) if seconds else 0.0)
            axes.barh(list(groups), widths, left=base, color=colours[phase], label=phase)
            base = [low + width for low, width in zip(base, widths)]
        axes.invert_yaxis()
        axes.set_xlabel("seconds per step, mean")
    _legend(axes)
    return True


def _finish(axes: plt.Axes, ylabel: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _legend(axes: plt.Axes, handles: Sequence[Artist] | None = None) -> None:
    """Beside the axes; of what has a label if there are no ``handles``."""
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _phase_seconds(data: dict) -> dict[str, float]:
    """Seconds per phase of one step. Nested timers (with another ``/``) lie inside a phase, ``testing`` outside."""
    prefix = "timing_s/"
    seconds = {
        key.removeprefix(prefix): float(value)
        for key, value in data.items()
        if key.startswith(prefix) and "/" not in key.removeprefix(prefix) and _is_finite(value)
    }
    total = seconds.pop("step", 0.0)
    seconds.pop("testing", None)
    rest = total - sum(seconds.values())
    return seconds | ({"other": rest} if rest > 0 else {})


def _phases(runs: Iterable[Run]) -> list[str]:
    """Phases that take at least a hundredth of the time, in the order in which a step runs them."""
    total: dict[str, float] = {}
    for run in runs:
        for _, data in run.records:
            if STEP_SECONDS in data:
                for phase, seconds in _phase_seconds(data).items():
                    total[phase] = total.get(phase, 0.0) + seconds
    shown = {phase for phase, seconds in total.items() if seconds >= 0.01 * sum(total.values())}
    known = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights"]
    return [p for p in known if p in shown] + sorted(shown - {*known, "other"}) + [p for p in ["other"] if p in shown]


FIGURES = (
    Figure(
        "reward",
        "Reward",
        "Mean score of the sampled responses of each step.",
        lines((REWARD, "mean"), ylabel="mean score", bottom=0.0),
    ),
    Figure(
        "accuracy",
        "Held-out accuracy",
        _accuracy_caption,
        _draw_accuracy,
    ),
    Figure(
        "mismatch",
        "Rollout against trainer",
        "How far the policy that sampled is from the policy that is trained, before the update: k3 estimate of the KL "
        "divergence per token, and the largest difference of a sampled token's probability.",
        lines(
            (MISMATCH, "k3 KL (nat)"),
            ("training/rollout_probs_diff_max", "max |Δp|"),
            ylabel="per token",
            log=True,
        ),
    ),
    Figure(
        "clip_fraction",
        "Clip fraction",
        "Share of tokens whose probability ratio left the trust region in the update.",
        lines(
            ("actor/pg_clipfrac", "upper or lower bound"),
            ("actor/pg_clipfrac_lower", "dual clip"),
            ylabel="share of tokens",
            bottom=0.0,
        ),
    ),
    Figure(
        "entropy",
        "Entropy",
        "Mean entropy of the policy's next-token distribution on its own responses.",
        lines(("actor/entropy", "entropy"), ylabel="nat per token", bottom=0.0),
    ),
    Figure(
        "response_length",
        "Response length",
        "Tokens per response, end of turn included.",
        lines(("response_length/mean", "mean"), ("response_length/max", "longest"), ylabel="tokens", bottom=0.0),
    ),
    Figure("timings", "Time per step", "Seconds of a step by phase, validation left out.", _draw_timings),
)


# --- page ------------------------------------------------------------------------------------------------------------


def _figure_html(figure: Figure, canvas: plt.Figure, runs: Sequence[Run]) -> str:
    buffer = io.StringIO()
    # The salt keeps the ids of clip paths and markers distinct between figures of one page.
    with plt.rc_context({"svg.hashsalt": figure.name}):
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    caption = figure.caption if isinstance(figure.caption, str) else figure.caption(runs)
    return f"<figure id='{figure.name}'>{svg}<figcaption>{html.escape(caption)} </figcaption></figure>"


def _summary_html(run: Run, runs: Sequence[Run]) -> str:
    """Tiles of ``run``, one of the page's ``runs``."""
    keys = accuracy_keys(runs)
    figures = []
    for name, key in keys.items():
        steps, values = run.series(key)
        title = f"held-out accuracy{f' of {name}' if len(keys) > 1 else ''}"
        if len(values) > 1:
            when = "before → after" if steps[0] == 0 else f"step {steps[0]} → {steps[-1]}"
            gain = 100 * (values[-1] - values[0])
            figures.append((f"{values[0]:.0%} → {values[-1]:.0%}", f"{title}, {when} ({gain:+.0f} points)"))
        elif values:
            figures.append((f"{values[0]:.0%}", f"{title}, {f'step {steps[0]}' if steps[0] else 'before'}"))
    rewards = run.series(REWARD)[1]
    if rewards:
        figures.append((f"{rewards[0]:.2f} → {rewards[-1]:.2f}", "reward, first → last step"))
    mismatch = run.mean(MISMATCH)
    if mismatch is not None:
        figures.append((f"{mismatch:.1e}", "k3 KL between rollout and trainer, mean"))
    seconds = run.series(STEP_SECONDS)[1]
    if seconds:
        figures.append((f"{statistics.median(seconds):.1f} s", f"per step, median of {len(seconds)}"))
    heading = f"<h2>{html.escape(run.name)}</h2>" if len(runs) > 1 else ""
    tiles = "".join(f"<div><strong>{value}</strong><span>{html.escape(label)}</span></div>" for value, label in figures)
    return f"{heading}<section class='tiles'>{tiles}</section>"


def _facts_html(runs: Sequence[Run]) -> str:
    """A table: one row per fact, one column per run. Nested facts become ``outer.inner``."""
    columns = [{**_flatten(run.facts), **_measured(run)} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    header = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(_text(column.get(name, '–')))}</td>" for column in columns)
        + "</tr>"
        for name in names
    )
    return f"<table><thead><tr><th></th>{header}</tr></thead><tbody>{rows}</tbody></table>"


def _measured(run: Run) -> dict:
    """Rows of the table that come from metrics: means of everything this project logs itself (``actor/jetrl/*``)."""
    own = {key for _, data in run.records for key in data if "jetrl/" in key}
    means = {key: run.mean(key) for key in (*sorted(own), MISMATCH, STEP_SECONDS)}
    return {f"{key.removeprefix('actor/')}, mean": value for key, value in means.items() if value is not None}


def _flatten(facts: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in facts.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

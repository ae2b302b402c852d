# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Picture and tables of docs/evidence.md: final accuracy and updates until collapse over the k3_kl that runs had.

python3 -m benchmarks.evidence.picture OUT...   # folders of results; writes evidence.png and prints Markdown
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps import TIME_UP
from jetrl_verl.tools.report import STYLE, plt

WINDOW = 10  # rollouts of a moving mean
BINOMIAL = 0.022  # standard error of a gain: two accuracies of 1,024 problems
CONTROL = "jet_fp8"  # without mismatch; all others of its loss are compared with it


@dataclass(frozen=True)
class Result:
    """What a run showed.

    Attributes:
        k3_kl: median over its rollouts. before, after: accuracy on the test problems, None where it was not measured.
        collapsed: updates until the moving mean of the training score was below half of its best or a gradient was not
            finite, None if never.
        updates: that it took. first, last: metric -> mean over the first and the last ``WINDOW`` rollouts before that.
        counts: it took all updates, had collapsed, or its time was up after 0.8 of the updates.
    """

    arm: str
    loss: str
    seed: int
    k3_kl: float
    before: float | None
    after: float | None
    collapsed: int | None
    updates: int
    first: dict[str, float]
    last: dict[str, float]
    counts: bool

    @property
    def gain(self) -> float | None:
        """Accuracy gained; of a run that collapsed, what its end or its loss of everything left."""
        return None if self.before is None or self.after is None else self.after - self.before


def collapse_of(scores: Sequence[float]) -> int | None:
    """Rollouts until the moving mean of ``scores`` was below half of its best so far, or None."""
    best = 0.0
    for end in range(WINDOW, len(scores) + 1):
        mean = statistics.fmean(scores[end - WINDOW : end])
        best = max(best, mean)
        if mean < best / 2:
            return end
    return None


def result_of(file: Path) -> Result | None:
    """What a run showed; None for one without a rollout."""
    facts, *records = map(json.loads, file.read_text().splitlines()) if file.exists() else [{}]
    steps = [record for record in records if "score" in record]
    if not steps:
        return None
    answered = {record["step"]: record["accuracy"] for record in records if record.get("accuracy") is not None}
    broken = (i for i, record in enumerate(steps, 1) if record.get("grad_norm", 0) is None)
    collapse = min(filter(None, (collapse_of([record["score"] for record in steps]), next(broken, None))), default=None)
    intact = steps[:collapse]

    def means(rows: Sequence[dict]) -> dict[str, float]:
        keys = {key for row in rows for key, value in row.items() if value is not None}
        return {key: statistics.fmean(row[key] for row in rows if row.get(key) is not None) for key in keys}

    return Result(
        **{key: facts[key] for key in ("arm", "loss", "seed")},
        k3_kl=statistics.median([value for row in intact if (value := row.get("k3_kl")) is not None] or [math.inf]),
        before=answered.get(0),
        after=answered.get(facts["rollouts"]),
        collapsed=collapse and collapse * facts["updates"],
        updates=len(steps) * facts["updates"],
        first=means(intact[:WINDOW]),
        last=means(intact[-WINDOW:]),
        counts=len(steps) >= {0: 1, TIME_UP: 0.8 * facts["rollouts"]}.get(facts["status"], math.inf)
        or collapse is not None,
    )


def read_all(folders: Iterable[Path]) -> dict[tuple[str, str], list[Result]]:
    """(loss, arm) -> results of its seeds that count, by their k3_kl."""
    files = [file for folder in folders for file in sorted((folder / "results").glob("*.jsonl"))]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in map(result_of, files):
        if result is not None and result.counts:
            groups.setdefault((result.loss, result.arm), []).append(result)
    return dict(sorted(groups.items(), key=lambda group: (group[0][0], k3_of(group[1]))))


def k3_of(results: Sequence[Result]) -> float:
    """Median over seeds."""
    return statistics.median(result.k3_kl for result in results)


def spread(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Mean of the seeds and its standard error, at least that of the test problems; None without two numbers."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < 2:
        return None
    return statistics.fmean(numbers), max(statistics.stdev(numbers), BINOMIAL) / math.sqrt(len(numbers))


def difference(results: Sequence[Result], control: Sequence[Result]) -> str:
    """Points of gain more than ``control``, with twice the standard error; bold where the difference is outside."""
    one, other = (spread(result.gain for result in group) for group in (results, control))
    if one is None or other is None or results is control:
        return "-"
    points, noise = 100 * (one[0] - other[0]), 200 * math.hypot(one[1], other[1])
    text = f"{points:+.1f} ± {noise:.1f}"
    return f"**{text}**" if abs(points) > noise else text


def tables(groups: dict[tuple[str, str], list[Result]]) -> str:
    """Two tables in Markdown: what each arm gained, and what changed within its runs."""
    gains = ["| loss | arm | seeds | k3_kl | start | gain | to jet_fp8 | updates until collapse |", "|" + "---|" * 8]
    signs = ["| loss | arm | clipped | entropy | length | gradient norm | seconds a rollout |", "|" + "---|" * 7]
    for (loss, arm), results in groups.items():
        gained, started = spread(r.gain for r in results), spread(r.before for r in results)
        ends = ", ".join(f"{r.collapsed or f'none in {r.updates}'}" for r in results)
        cells = [f"{loss} | {arm} | {len(results)} | {k3_of(results):.1e}"]
        cells.append(f"{100 * started[0]:.1f}%" if started else "-")
        cells.append(f"{100 * gained[0]:+.1f} ± {200 * gained[1]:.1f}" if gained else "-")
        cells += [difference(results, groups.get((loss, CONTROL), [])), ends]
        gains.append(f"| {' | '.join(cells)} |")

        def change(key: str, form: str, results: Sequence[Result] = results) -> str:
            means = [
                [side[key] for side in sides if key in side] for sides in zip(*((r.first, r.last) for r in results))
            ]
            return " to ".join(format(statistics.fmean(values), form) if values else "-" for values in means)

        keys = (("clipped", ".1e"), ("entropy", ".3f"), ("length", ".0f"), ("grad_norm", ".2g"), ("seconds", ".1f"))
        signs.append(f"| {loss} | {arm} | {' | '.join(change(key, form) for key, form in keys)} |")
    return "\n".join([*gains, "", *signs])


def draw(groups: dict[tuple[str, str], list[Result]], path: Path) -> None:
    """Doses as a curve, methods as points; a column per loss. A k3_kl of 0 stands at the left end."""
    losses = list(dict.fromkeys(loss for loss, _ in groups))
    positive = [r.k3_kl for results in groups.values() for r in results if r.k3_kl > 0]
    zero = min(positive, default=1e-6) / 10
    rows: dict[str, Callable[[Result], float | None]] = {
        "final accuracy": lambda result: result.after,
        "updates until collapse, or taken": lambda result: result.collapsed or result.updates,
    }
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, len(losses), figsize=(6 * len(losses), 7), squeeze=False, layout="constrained")
        for column, loss in enumerate(losses):
            of_loss = {arm: results for (one, arm), results in groups.items() if one == loss}
            for axes, (label, value) in zip(grid[:, column], rows.items(), strict=True):
                curve = []
                for arm, results in of_loss.items():
                    points = [(max(r.k3_kl, zero), y) for r in results if (y := value(r)) is not None]
                    if not points:
                        continue
                    dose = "@" in arm and "stays" not in arm
                    axes.plot(*zip(*points), "o", color="0.5" if dose else None, label=None if dose else arm, alpha=0.8)
                    if dose or arm == CONTROL:
                        curve.append([statistics.fmean(axis) for axis in zip(*points)])
                if curve:
                    axes.plot(*zip(*sorted(curve)), color="0.5", label="doses", zorder=0)
                axes.set(xscale="log", xlabel=f"k3_kl (0 at {zero:.0e})", ylabel=label, title=loss)
                axes.legend(fontsize="small")
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="+", metavar="OUT")
    parser.add_argument("--picture", type=Path, default=Path("evidence.png"))
    options = parser.parse_args()
    groups = read_all(options.out)
    if not groups:
        parser.error("no run in these folders has a rollout. Name folders that hold results/*.jsonl.")
    draw(groups, options.picture)
    print(tables(groups))


if __name__ == "__main__":
    main()

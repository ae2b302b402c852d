# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The table of ``jetrl compare``: accuracy of each precision with its errors, and means of its training metrics."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from jetrl_verl.inputs import UserError
from jetrl_verl.tools.report import MISMATCH, REWARD, STEP_SECONDS, Run

BEFORE = "before training"
Scores = Sequence[Sequence[float]]
"""Problem -> sample -> score."""

CAPTION = (
    "Accuracy: final weights in one BF16 engine, same prompts, and its standard error over problems. Δ: difference to "
    "the first precision, paired by problem. Between seeds: standard deviation of runs. Others: from the training."
)

FORMS = {
    "accuracy": ".1%",
    "± accuracy": ".1%",
    "Δ": "+.1%",
    "± Δ": ".1%",
    "between seeds": ".1%",
    "last reward": ".3f",
    "k3 KL": ".1e",
    "k3 KL, current": ".1e",
    "stale tokens": ".1%",
    "s/step": ".1f",
}
"""Column -> how its number is written."""

BY_LAG = ("k3 KL, current", "stale tokens")
"""Columns of asynchronous trainers: tokens that the trainer's weights sampled, and the share of the others."""

_CURRENT = "rollout_corr/lag_0"
_TOKENS = re.compile(r"rollout_corr/lag_\w+/tokens")


def summarize(
    scores: Mapping[str, Sequence[Scores]], runs: Mapping[str, Sequence[Run]], baseline: str
) -> dict[str, dict[str, float | None]]:
    """Precision -> column -> number, None where it is not known. ``scores`` and ``runs`` have an entry per seed.

    The accuracy is the mean over problems of the mean over seeds and samples. Differences are to ``baseline``; pairing
    by problem removes the noise that both precisions share. ``UserError`` if two runs answered different problems.
    """
    counts = {precision: sorted(map(len, seeds)) for precision, seeds in scores.items()}
    if len(set().union(*counts.values())) > 1:
        raise UserError(f"The runs answered different numbers of problems ({counts}). Choose another --out.")
    problems = {
        precision: [statistics.fmean(map(statistics.fmean, samples)) for samples in zip(*seeds)]
        for precision, seeds in scores.items()
    }
    rows = {}
    for precision, seeds in scores.items():
        differences = []
        if baseline in scores and precision != baseline:
            differences = [score - other for score, other in zip(problems[precision], problems[baseline])]
        means = [statistics.fmean(map(statistics.fmean, table)) for table in seeds]
        trained = runs.get(precision, ())
        seconds = [value for run in trained for value in run.series(STEP_SECONDS)[1]]
        rows[precision] = {
            "accuracy": _mean(problems[precision]),
            "± accuracy": _standard_error(problems[precision]),
            "Δ": _mean(differences),
            "± Δ": _standard_error(differences),
            "between seeds": statistics.stdev(means) if len(means) > 1 else None,
            "last reward": _mean([values[-1] for run in trained if (values := run.series(REWARD)[1])]),
            "k3 KL": _mean([mean for run in trained if (mean := run.mean(MISMATCH)) is not None]),
            "k3 KL, current": _mean([mean for run in trained if (mean := run.mean(f"{_CURRENT}/k3_kl")) is not None]),
            "stale tokens": _stale(trained),
            "s/step": statistics.median(seconds) if seconds else None,
        }
    return rows


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _stale(runs: Sequence[Run]) -> float | None:
    """Share of compared tokens that older weights sampled."""
    tokens: Counter[str] = Counter()
    for _, data in (record for run in runs for record in run.records):
        tokens.update({name: count for name, count in data.items() if _TOKENS.fullmatch(name)})
    return 1 - tokens[f"{_CURRENT}/tokens"] / tokens.total() if tokens else None


def cells(rows: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Header and rows of the table as text; an empty string for what is not known, no column by lag without a lag."""
    forms = {
        column: form
        for column, form in FORMS.items()
        if column not in BY_LAG or any(row[column] is not None for row in rows.values())
    }
    return [["precision", *forms]] + [
        [name, *("" if row[column] is None else f"{row[column]:{form}}" for column, form in forms.items())]
        for name, row in rows.items()
    ]

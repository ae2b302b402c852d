# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study's task: follow a chain of assignments modulo 97, one line of work per assignment.

A problem of level n gives a first value and n assignments, each from the variable before it and a constant. The worked
solution has a line for each, of the values, the plain result, and the result modulo 97; the last value is the answer::

    r=37;k=r*44;c=k+40;m=c-95;m?   ->   37*44=1628=76
                                        76+40=116=19
                                        19-95=-76=21
                                        #### 21

Two things are left out on purpose (docs/log/study.md, fourth and fifth window). The second operand is never a variable:
looking an earlier value up by its name is learnt suddenly, after 2,000 steps of the warm-up or not in 6,000. And lines
have no names: a policy that had not learnt the names still had an accuracy of 0.9, but its worked solutions, which the
warm-up looks at, had a probability of 0.05.

Every line feeds the next, so one wrong line makes the answer wrong, and accuracy falls with n as (1 - error per
line)^n. This sets the difficulty: ``levels`` sets lengths of 6 to 24 lines (80 to 310 tokens) in equal shares, and the
warm-up's target sets the error per line. An error of 6% begins at 0.69, 0.48, 0.33 and 0.23 on the four levels, 0.43
together; to reach 0.9 together it must fall under 1%, so there is room.

A problem belongs to the split that a hash of its prompt names. So splits of any size and seed are disjoint, and the
warm-up may draw any number of problems without drawing one of another split. The reward is that of the demo
(``jetrl_verl/tools/demo/task.py``): the last line must be ``#### <answer>``, nothing else counts.
"""

import hashlib
import random
import string
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "jetrl/modular_chain"
"""``data_source`` column; verl names the accuracy ``val-core/<data_source>/acc/mean@<n>`` after it."""

MODULUS = 97

SPLITS = {"test": 16, "validation": 16, "train": 32, "warmup": 64}
"""Split -> its share of all problems, in 128ths. ``validation`` draws the curves of a run, ``test`` decides."""

MAX_LEVEL = len(string.ascii_lowercase) - 1
"""A problem of level n has n + 1 variables, each a letter of its own."""


@dataclass(frozen=True)
class Problem:
    """A chain of assignments.

    Attributes:
        first: name and value of the first variable.
        assignments: (name, operator, constant) of each further one; the first operand is the variable before it.
    """

    first: tuple[str, int]
    assignments: tuple[tuple[str, str, int], ...]

    level = property(lambda self: len(self.assignments))

    @property
    def prompt(self) -> str:
        """What the user turn says."""
        name, value = self.first
        parts = [f"{name}={value}"]
        for target, operator, constant in self.assignments:
            parts.append(f"{target}={name}{operator}{constant}")
            name = target
        return ";".join([*parts, f"{name}?"])

    @property
    def solution(self) -> str:
        """The worked lines followed by the answer line, without the end-of-turn token."""
        return "\n".join([*(line for line, _ in self._work()), f"#### {self.answer}"])

    @property
    def answer(self) -> str:
        """The last value in decimal, as it must stand after ``####``."""
        return str(self._work()[-1][1])

    def _work(self) -> list[tuple[str, int]]:
        """Line and value of each assignment."""
        value, work = self.first[1], []
        for _, operator, constant in self.assignments:
            plain = {"+": value + constant, "-": value - constant, "*": value * constant}[operator]
            line = f"{value}{operator}{constant}={plain}={plain % MODULUS}"
            value = plain % MODULUS
            work.append((line, value))
        return work


def draw(stream: random.Random, level: int) -> Problem:
    """A problem of ``level`` assignments from ``stream``, of any split.

    Raises:
        ValueError: ``level`` is not between 1 and ``MAX_LEVEL``.
    """
    if not 1 <= level <= MAX_LEVEL:
        raise ValueError(f"level {level} is not supported. Set 1 to {MAX_LEVEL}.")
    names = stream.sample(string.ascii_lowercase, level + 1)
    assignments = []
    for name in names[1:]:
        operator = stream.choice("+-*")
        constant = stream.randrange(2 if operator == "*" else 1, MODULUS)
        assignments.append((name, operator, constant))
    return Problem((names[0], stream.randrange(MODULUS)), tuple(assignments))


def split_of(problem: Problem) -> str:
    """The split of ``problem``; it depends only on the prompt."""
    bucket = hashlib.blake2b(problem.prompt.encode(), digest_size=8).digest()[0] % sum(SPLITS.values())
    for split, share in SPLITS.items():
        if bucket < share:
            return split
        bucket -= share
    raise AssertionError("the shares cover every bucket")


def problems(split: str, count: int, levels: tuple[int, ...], seed: int | str) -> list[Problem]:
    """``count`` problems of ``split``, levels in turn, from one seeded stream; equal on every machine."""
    stream = random.Random(f"{split} {seed}")
    found: list[Problem] = []
    while len(found) < count:
        problem = draw(stream, levels[len(found) % len(levels)])
        if split_of(problem) == split:
            found.append(problem)
    return found


def token_limits(levels: tuple[int, ...]) -> tuple[int, int]:
    """Tokens that no prompt (chat template included) and no worked solution (end of turn included) exceeds.

    One token per character; roles, markers and ``####`` are one token each. Rounded up to multiples of 16.
    """
    longest = max(levels)
    prompt = len("r=37;") + longest * len("k=r+37;") + len("m?") + 8
    response = longest * len("96*43=4128=54\n") + 5
    return -(-prompt // 16) * 16, -(-response // 16) * 16


def write_parquet(rows: list[Problem], split: str, path: Path) -> None:
    """Write problems in verl's RL schema (``data.train_files``, ``data.val_files``)."""
    import pyarrow
    import pyarrow.parquet

    table = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split, "level": problem.level},
        }
        for index, problem in enumerate(rows)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)

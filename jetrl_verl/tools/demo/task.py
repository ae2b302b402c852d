# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's task: add two numbers digit by digit, write every carry, and state the sum after ``####``.

A solution has one line ``digit+digit+carry=sum`` per decimal place, the ones first, and then the answer::

    737+219   ->   7+9+0=16
                   3+1+1=05
                   7+2+0=09
                   #### 956

verl imports this file by path in its reward workers, so nothing heavy is imported at the top."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "jetrl/addition"
"""Column ``data_source``, part of the name of verl's held-out metric."""

SPLITS = ("warmup", "train", "test")

_ANSWER_LINE = re.compile(r"#### (\d+)")


@dataclass(frozen=True)
class TaskConfig:
    """Sizes and seed of the disjoint splits: ``warmup`` (supervised), ``train`` (prompts of the RL run), ``test``
    (held out). ``digits`` is the length of both numbers; ``a+b`` and ``b+a`` are one problem."""

    digits: int = 3
    warmup: int = 16384
    train: int = 4096
    test: int = 256
    seed: int = 7

    def __post_init__(self):
        if self.digits < 1:
            raise ValueError(f"the task needs numbers of at least one digit, not {self.digits}")
        numbers = 9 * 10 ** (self.digits - 1)
        available, asked = numbers * (numbers + 1) // 2, self.warmup + self.train + self.test
        if asked > available // 2:  # beyond half, most draws repeat a problem
            raise ValueError(
                f"{asked} problems asked for, but only {available} exist with {self.digits} digits; ask fewer"
            )


@dataclass(frozen=True)
class Problem:
    """Two numbers to add."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the user turn says."""
        return f"{self.a}+{self.b}"

    @property
    def answer(self) -> str:
        """The sum in decimal."""
        return str(self.a + self.b)

    @property
    def solution(self) -> str:
        """Worked lines and answer line, without the end-of-turn token."""
        lines, carry, a, b = [], 0, self.a, self.b
        while a or b:
            x, y = a % 10, b % 10
            total = x + y + carry
            lines.append(f"{x}+{y}+{carry}={total:02d}")
            carry, a, b = total // 10, a // 10, b // 10
        return "\n".join([*lines, f"#### {self.answer}"])


def make_splits(config: TaskConfig) -> dict[str, list[Problem]]:
    """Draw all splits from one seeded stream: the same problems on every machine."""
    stream = random.Random(config.seed)
    low, high = 10 ** (config.digits - 1), 10**config.digits
    seen: set[tuple[int, int]] = set()

    def draw() -> Problem:
        while True:
            a, b = stream.randrange(low, high), stream.randrange(low, high)
            key = (min(a, b), max(a, b))
            if key not in seen:
                seen.add(key)
                return Problem(a, b)

    # Held-out problems first: a larger training split leaves them as they are.
    sizes = {"test": config.test, "train": config.train, "warmup": config.warmup}
    drawn = {name: [draw() for _ in range(size)] for name, size in sizes.items()}
    return {name: drawn[name] for name in SPLITS}


def to_row(problem: Problem, index: int, split: str) -> dict:
    """One row in verl's RL parquet schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split},
    }


def write_parquet(problems: list[Problem], split: str, path: Path) -> None:
    """Write ``problems`` as verl reads them (``data.train_files``, ``data.val_files``)."""
    import pyarrow
    import pyarrow.parquet

    rows = [to_row(problem, index, split) for index, problem in enumerate(problems)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """Grade a response by its last line; verl calls this through ``reward.custom_reward_function``.

    Returns:
        ``score``, the reward, and ``acc``, the held-out accuracy, are 1.0 if the last line is exactly
        ``#### <ground_truth>``, else 0.0; ``formatted`` is 1.0 if that line has the right shape.
    """
    last_line = solution_str.rstrip().rpartition("\n")[2]
    stated = _ANSWER_LINE.fullmatch(last_line)
    correct = float(stated is not None and stated.group(1) == ground_truth)
    return {"score": correct, "acc": correct, "formatted": float(stated is not None)}

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The task of docs/evidence.md: add a chain of numbers modulo 1000 digit by digit, and state the last sum.

A problem of n steps has a first number and n labelled ones. Each step copies its number and adds it to the sum so far,
the ones first, in lines ``word digit+digit+carry=sum``. Forty tokens a step::

    737a219b105   ->   a219
                       ?9+7+0=16
                       [1+3+1=05
                       $2+7+0=09
                       =956
                       b105
                       ...
                       #### 061

One wrong digit makes the answer wrong, so a policy that is right 0.4 of the time has hardly any entropy in its digits.
The word at the start of a line is free, any of ``FREE``: 0.2 nat a token, as text has, that the reward of
``jetrl_verl.tools.demo.task`` does not judge."""

import random
import string
from dataclasses import dataclass

DIGITS, MODULUS = 3, 1000
FREE = "!@$%&*_~^?<>[]{}"
LABELS = string.ascii_letters
STEP_TOKENS = 40


@dataclass(frozen=True)
class Problem:
    """Numbers to add, and the seed of the free words of its solution."""

    numbers: tuple[int, ...]
    seed: int

    @property
    def prompt(self) -> str:
        """What the user turn says."""
        first, *others = (f"{number:0{DIGITS}d}" for number in self.numbers)
        return first + "".join(label + number for label, number in zip(LABELS, others))

    @property
    def answer(self) -> str:
        """The last sum, as it must stand after ``####``."""
        return f"{sum(self.numbers) % MODULUS:0{DIGITS}d}"

    @property
    def solution(self) -> str:
        """Worked lines and answer line, without the end-of-turn token."""
        words, (total, *others), lines = random.Random(self.seed), self.numbers, []
        for label, number in zip(LABELS, others):
            lines.append(f"{label}{number:0{DIGITS}d}")
            carry = 0
            for place in range(DIGITS):
                a, b = number // 10**place % 10, total // 10**place % 10
                lines.append(f"{words.choice(FREE)}{a}+{b}+{carry}={a + b + carry:02d}")
                carry = (a + b + carry) // 10
            total = (total + number) % MODULUS
            lines.append(f"={total:0{DIGITS}d}")
        return "\n".join([*lines, f"#### {self.answer}"])


def draw_problems(split: str, count: int, levels: tuple[int, ...]) -> list[Problem]:
    """``count`` problems whose numbers of steps are ``levels`` (at most 52) in turn; equal on every machine.

    Splits are independent draws: of 10^42 chains of thirteen steps two do not meet.
    """
    stream = random.Random(split)
    numbers = (tuple(stream.randrange(MODULUS) for _ in range(1 + levels[i % len(levels)])) for i in range(count))
    return [Problem(chain, stream.randrange(2**32)) for chain in numbers]


def token_limits(levels: tuple[int, ...]) -> tuple[int, int]:
    """Tokens that no prompt with its template and no solution with its end of turn exceeds, multiples of 16."""
    longest = max(levels)
    prompt, response = DIGITS + longest * (1 + DIGITS) + 10, longest * STEP_TOKENS + 6
    return -(-prompt // 16) * 16, -(-response // 16) * 16

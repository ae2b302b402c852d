# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reward for data that verl cannot grade: the boxed answer, compared by math-verify in bounded time.

verl loads this file by path in its reward workers (``reward.custom_reward_function.path``), so it imports nothing of
this tree. A ``data_source`` that is not listed here goes to verl's own reward.

``verl.utils.reward_score.math_verify`` returns 0 for a missing package or a broken process pool as for a wrong answer,
and its 30 seconds include the wait for a free process: training on noise without an error. Here a missing package stops
the run at its start, waiting does not count, and a comparison that does not end is killed and alone counts as wrong.

math-verify bounds its time with SIGALRM, which works in a main thread only, and verl calls rewards from threads. So
this file is also the program of a child process that reads pairs of answers and writes verdicts.
"""

import importlib.util
import json
import queue
import select
import subprocess
import sys
from contextlib import contextmanager

THINKING = ("agentica-org/DeepScaleR-Preview-Dataset", "HuggingFaceH4/aime_2024", "")
"""Data of models that think first: the answer counts only after ``</think>``, as in DeepScaleR. The published
DeepScaleR parquet has an empty ``data_source``."""

PLAIN = ("zwhe99/DeepMath-103K",)
"""Data whose last boxed answer counts, wherever it is."""

MAX_ANSWER_CHARACTERS = 512
"""A longer boxed answer is wrong without being parsed; the longest in MATH-500 has 159 characters."""

ALARM_SECONDS = 3
"""math-verify's own bound on parsing one answer and on comparing two, which does not interrupt every C loop."""

KILL_SECONDS = 15
"""After this long without a verdict the comparing process is killed. Parsing twice and comparing fit well within."""

START_SECONDS = 120
"""How long a comparing process may take to import math-verify from a slow disk."""

MEMORY_BYTES = 4 << 30
"""Address space of a comparing process: 9^9^9^9 must not take the machine's memory."""

PROCESSES = 4
"""Comparing processes of one reward worker (verl starts ``reward.num_workers`` of those, 8 by default)."""


class RewardError(RuntimeError):
    """Rewards cannot be computed at all; never raised for a wrong answer."""


def compute_score(data_source: str, solution_str: str, ground_truth, extra_info: dict | None = None, **kwargs):
    """verl's reward function.

    Args:
        data_source: chooses the rule: ``THINKING``, ``PLAIN``, or verl's own.
        solution_str: the response as text, of any length.
        ground_truth: the answer, or several of which any counts; LaTeX with or without ``\\boxed{}``.
        extra_info: passed on to verl's own reward with ``kwargs``.

    Returns:
        1.0 or 0.0 for the listed sources, otherwise what verl returns.

    Raises:
        RewardError: math-verify is missing or its process does not start.
    """
    from verl.utils.reward_score import default_compute_score

    if data_source not in THINKING + PLAIN:
        return default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    if data_source in THINKING:
        _, ended, solution_str = solution_str.rpartition("</think>")
        if not ended:
            return 0.0
    answer = _last_boxed(solution_str)
    if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    truths = [ground_truth] if isinstance(ground_truth, str | int | float) else ground_truth
    return float(any(_equal(_last_boxed(str(truth)) or str(truth), answer) for truth in truths))


def _last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{}`` with its braces closed."""
    from verl.utils.reward_score.math_dapo import last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(text)
    return None if boxed is None else remove_boxed(boxed).strip()


def _equal(truth: str, answer: str) -> bool:
    if truth.strip() == answer:
        return True
    with _comparer() as comparer:
        return comparer.equal(truth, answer)


class _Comparer:
    """A child process that compares two answers; restarted after it was killed."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def equal(self, truth: str, answer: str) -> bool:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._process.stdin.write(json.dumps([truth, answer]) + "\n")
            self._process.stdin.flush()
            verdict = self._line(KILL_SECONDS)
        except OSError:  # the process ended
            verdict = ""
        if not verdict:
            self._end()
        return verdict == "equal\n"

    def _start(self) -> None:
        # -P: the child must not find this folder's modules before installed ones.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._line(START_SECONDS) != "ready\n":
            self._end()
            raise RewardError(f"math-verify does not start; run `{' '.join(command)}` and fix what it says")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()  # reaps it and closes its pipes
        self._process = None

    def _line(self, seconds: float) -> str:
        """The next line, ``""`` if the process ended or wrote none in time. It writes one line per request."""
        readable, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline() if readable else ""


_IDLE: queue.LifoQueue = queue.LifoQueue()  # last in, first out: only as many processes start as are needed at once
for _ in range(PROCESSES):
    _IDLE.put(_Comparer())


@contextmanager
def _comparer():
    comparer = _IDLE.get()
    try:
        yield comparer
    finally:
        _IDLE.put(comparer)


def _serve() -> None:
    """The child: ``ready``, then for each line ``[truth, answer]`` one line ``equal`` or ``different``; ends at EOF."""
    import logging
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.ERROR)  # a warning per unparsable answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    latex = (LatexExtractionConfig(),)

    def parsed(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", latex, parsing_timeout=ALARM_SECONDS)

    print("ready", flush=True)
    for line in sys.stdin:
        truth, answer = json.loads(line)
        try:
            same = verify(parsed(truth), parsed(answer), timeout_seconds=ALARM_SECONDS)
        except Exception:  # from sympy, MemoryError included: not comparable is not equal
            same = False
        print("equal" if same else "different", flush=True)


if __name__ == "__main__":
    _serve()
elif importlib.util.find_spec("math_verify") is None:
    raise RewardError("the reward of this recipe needs math-verify; pip install math-verify")

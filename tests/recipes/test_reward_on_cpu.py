# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The recipes' reward: right, wrong and garbage answers of every source, in bounded time."""

import importlib.util
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from recipe_cases import RECIPES

DEEPSCALER, AIME, PUBLISHED = "agentica-org/DeepScaleR-Preview-Dataset", "HuggingFaceH4/aime_2024", ""
DEEPMATH = "zwhe99/DeepMath-103K"


def load():
    spec = importlib.util.spec_from_file_location("recipe_reward", RECIPES / "common" / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reward():
    module = load()
    yield module
    for comparer in module._IDLE.queue:
        if comparer._process is not None:
            comparer._end()


@pytest.mark.parametrize(
    ("source", "response", "truth", "score"),
    [
        (DEEPMATH, "It is $\\boxed{\\frac{1}{2}}$.", "\\dfrac{1}{2}", 1.0),
        (DEEPMATH, "It is $\\boxed{0.5}$.", "\\dfrac{1}{2}", 1.0),
        (DEEPMATH, "First \\boxed{7}, no: \\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (DEEPMATH, "\\boxed{\\text{Yes}}", "Yes", 1.0),
        (DEEPMATH, "First \\boxed{0.5}, no: \\boxed{7}", "\\dfrac{1}{2}", 0.0),
        (DEEPMATH, "It is 0.5.", "\\dfrac{1}{2}", 0.0),
        (DEEPMATH, "It is \\boxed{0.5", "\\dfrac{1}{2}", 0.0),
        (DEEPMATH, "\\boxed{}", "\\dfrac{1}{2}", 0.0),
        (DEEPMATH, "\\boxed{\\frac{}{\\sqrt[}}}}", "\\dfrac{1}{2}", 0.0),
        (DEEPMATH, "", "\\dfrac{1}{2}", 0.0),
        (DEEPSCALER, "<think>2*2</think> \\boxed{4\\pi}", "4\\pi", 1.0),
        (DEEPSCALER, "2*2</think> \\boxed{\\pi \\cdot 4}", "$4\\pi$", 1.0),
        (DEEPSCALER, "</think> \\boxed{0.5}", ["\\frac{1}{3}", "\\boxed{\\frac{1}{2}}"], 1.0),
        (DEEPSCALER, "\\boxed{4\\pi}", "4\\pi", 0.0),  # never finished thinking
        (DEEPSCALER, "\\boxed{4\\pi}</think> I do not know.", "4\\pi", 0.0),
        (DEEPSCALER, "</think> \\boxed{4}", "4\\pi", 0.0),
        (PUBLISHED, "</think> \\boxed{204}", "204", 1.0),
        (PUBLISHED, "</think> \\boxed{205}", "204", 0.0),
        (AIME, "</think> \\boxed{204.0}", "204", 1.0),
        (AIME, "</think> \\boxed{204}", 204, 1.0),
        ("openai/gsm8k", "so\n#### 5,000", "5000", 1.0),
        ("openai/gsm8k", "so \\boxed{5000}", "5000", 0.0),
        ("HuggingFaceH4/MATH-500", "so \\boxed{2}", "2", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "so \\boxed{3/4}", "\\frac{3}{4}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "so \\boxed{1/4}", "\\frac{3}{4}", 0.0),
    ],
)
def test_an_answer_is_right_or_wrong(reward, source, response, truth, score):
    assert reward.compute_score(source, response, truth) == score


def test_an_unknown_source_is_refused_by_verl_and_not_scored(reward):
    with pytest.raises(NotImplementedError, match="nobody/knows"):
        reward.compute_score("nobody/knows", "\\boxed{1}", "1")


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9^{9}}}}", "(10^{10})!", "\\sum_{n=1}^{10^{12}} \\sin(n)", "(" * 200 + "3" + ")" * 200]
)
def test_an_answer_without_end_is_wrong_in_seconds(reward, answer):
    started = time.monotonic()
    assert reward.compute_score(DEEPMATH, f"\\boxed{{{answer}}}", "4") == 0.0
    assert time.monotonic() - started < reward.KILL_SECONDS
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 1.0


def test_a_response_of_a_million_characters_is_graded_in_seconds(reward):
    started = time.monotonic()
    assert reward.compute_score(DEEPSCALER, "\\boxed{1+" * 100_000 + "</think> \\boxed{8/2}", "4") == 1.0
    assert reward.compute_score(DEEPMATH, f"\\boxed{{{'1+' * 500_000}1}}", "500001") == 0.0  # longer than any answer
    assert time.monotonic() - started < 2


def test_a_hung_comparison_is_killed_and_only_its_answer_is_wrong(reward, monkeypatch):
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 1.0
    hung = reward._IDLE.queue[-1]._process
    os.kill(hung.pid, signal.SIGSTOP)  # deaf to its own alarm, as in a long loop of C
    monkeypatch.setattr(reward, "KILL_SECONDS", 1)
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 0.0
    assert hung.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 1.0


def test_a_killed_comparer_is_replaced(reward):
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 1.0
    killed = reward._IDLE.queue[-1]._process
    killed.kill()
    killed.wait()
    assert reward.compute_score(DEEPMATH, "\\boxed{8/2}", "4") == 1.0


def test_answers_are_graded_from_many_threads_as_verl_does(reward):
    def grade(i: int) -> float:
        return reward.compute_score(DEEPMATH, f"\\boxed{{{2 * i}/2}}", str(i if i % 3 else -1 - i))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(grade, range(60))) == [float(i % 3 != 0) for i in range(60)]
    assert len(reward._IDLE.queue) == reward.PROCESSES


def test_a_missing_math_verify_stops_the_run_and_scores_nothing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        Exception, match="the reward of this recipe needs math-verify; pip install math-verify"
    ) as raised:
        load()
    assert type(raised.value).__name__ == "RewardError"


def test_a_comparer_that_does_not_start_stops_the_run(reward, monkeypatch):
    monkeypatch.setattr(reward.sys, "executable", "/bin/false")
    with pytest.raises(reward.RewardError, match="math-verify does not start; run `/bin/false -P .*reward.py` and"):
        reward._Comparer().equal("1", "2")

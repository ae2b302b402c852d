# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Raw data sets of the recipes, and how a raw record becomes a row for verl.

verl chooses a reward by ``data_source`` (``verl/utils/reward_score``); ``reward.py`` grades the sources that verl does
not know. The instruction appended to a question says where the reward looks for the answer: after ``####`` for GSM8K,
in ``\\boxed{}`` for the others, worded as in verl's examples. DAPO-Math-17k and its AIME-2024 include theirs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
BOXED_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_GSM8K_ANSWER = re.compile(r"#### *(-?[0-9][0-9.,]*)")


class RecordError(ValueError):
    """A raw record is malformed; the message completes ``record 7 of FILE ...``."""


class Problem(NamedTuple):
    """A problem: the reward that grades it, the user's turn, and the right answer."""

    data_source: str
    prompt: str
    ground_truth: str


@dataclass(frozen=True)
class Source:
    """One split of a published data set.

    Attributes:
        hub: name on the Hugging Face hub. config: its configuration, None for the default. split: its split.
        columns: raw columns that ``problem`` reads.
        problem: raw record -> ``Problem``; raises ``RecordError``.
        unique: keep the first record of each prompt only.
    """

    hub: str
    split: str
    columns: tuple[str, ...]
    problem: Callable[[dict[str, Any]], Problem]
    config: str | None = None
    unique: bool = False


def _gsm8k(record: dict[str, Any]) -> Problem:
    answers = _GSM8K_ANSWER.findall(record["answer"])
    if not answers:
        raise RecordError("has no '#### <number>' in its answer")
    # verl's reward strips the commas of a response before it compares.
    return Problem("openai/gsm8k", f"{record['question']} {GSM8K_INSTRUCTION}", answers[-1].replace(",", ""))


def _math(record: dict[str, Any]) -> Problem:
    from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

    try:
        answer = remove_boxed(last_boxed_only_string(record["solution"]))
    except (TypeError, AssertionError) as error:  # raised by verl's helpers if there is none
        raise RecordError("has no \\boxed{} in its solution") from error
    return Problem("DigitalLearningGmbH/MATH-lighteval", _boxed_prompt(record["problem"]), answer)


def _answered(data_source: str, question: str = "problem", answer: str = "answer") -> Callable[[dict], Problem]:
    """A record with question and final answer in two columns."""

    def problem(record: dict[str, Any]) -> Problem:
        if not isinstance(record[answer], str | int) or record[answer] == "":
            raise RecordError(f"has no answer in its column '{answer}'")
        return Problem(data_source, _boxed_prompt(record[question]), str(record[answer]))

    return problem


def _as_published(data_source: str) -> Callable[[dict], Problem]:
    """A record in verl's schema already, instruction included."""

    def problem(record: dict[str, Any]) -> Problem:
        try:
            (turn,), truth = record["prompt"], record["reward_model"]["ground_truth"]
            return Problem(data_source, turn["content"], str(truth))
        except (TypeError, KeyError, ValueError) as error:
            raise RecordError("is not one user turn with a reward_model.ground_truth") from error

    return problem


def _boxed_prompt(question: str) -> str:
    return f"{question} {BOXED_INSTRUCTION}"


GSM8K_TRAIN = Source("openai/gsm8k", "train", ("question", "answer"), _gsm8k, config="main")
GSM8K_TEST = Source("openai/gsm8k", "test", ("question", "answer"), _gsm8k, config="main")

MATH_TRAIN = Source("DigitalLearningGmbH/MATH-lighteval", "train", ("problem", "solution"), _math)
MATH_500 = Source("HuggingFaceH4/MATH-500", "test", ("problem", "answer"), _answered("HuggingFaceH4/MATH-500"))

DEEPMATH = Source(
    "zwhe99/DeepMath-103K",
    "train",
    ("question", "final_answer"),
    _answered("zwhe99/DeepMath-103K", "question", "final_answer"),
)

# Both files repeat their problems, DAPO-Math-17k about a hundred times and AIME-2024 32 times, as a way to count epochs
# and to average over samples. trainer.total_epochs and val_kwargs.n say the same, and start-up reads a hundredth of it.
# verl sends every data_source that starts with "aime" to the reward it has for "math_dapo".
DAPO_MATH = Source(
    "BytedTsinghua-SIA/DAPO-Math-17k", "train", ("prompt", "reward_model"), _as_published("math_dapo"), unique=True
)
DAPO_AIME_2024 = Source(
    "BytedTsinghua-SIA/AIME-2024", "train", ("prompt", "reward_model"), _as_published("aime_2024"), unique=True
)

DEEPSCALER = Source(
    "agentica-org/DeepScaleR-Preview-Dataset",
    "train",
    ("problem", "answer"),
    _answered("agentica-org/DeepScaleR-Preview-Dataset"),
)
AIME_2024 = Source("HuggingFaceH4/aime_2024", "train", ("problem", "answer"), _answered("HuggingFaceH4/aime_2024"))

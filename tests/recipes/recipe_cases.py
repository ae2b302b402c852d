# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of the recipe tests: variables that the scripts read, one raw record per data set."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

# fmt: off
SETTINGS = (
    "ATTENTION", "CHAT_TEMPLATE", "DATA", "DATASET", "EXPERIMENT", "GPUS_PER_NODE", "LOGGER", "MAX_RESPONSE_LENGTH",
    "MAX_TOKENS_PER_GPU", "METRICS", "MODEL_PATH", "NNODES", "OFFLOAD", "OUT", "PRECISION", "PYTHON", "RESPONSE",
    "ROLLOUT_GPUS", "SP", "STAGE", "TP",
)
# fmt: on
"""Variables that the scripts read; tests unset the developer's."""

PRINTER = """#!/usr/bin/env bash
[[ $1 == -m ]] || exit "${FAKE_STATUS:-0}"
shift
printf '%s\\0' "$@"
"""

# One record of each data set in the format of its raw file, after the data sets' cards; the problems are made up.
RAW_RECORDS = {
    "gsm8k": {
        "question": "Ann has 3 boxes of 1,000 pens. She buys 2 more. How many pens has she?",
        "answer": "She has 3+2=<<3+2=5>>5 boxes.\nThat is 5*1000=<<5*1000=5000>>5,000 pens.\n#### 5,000",
    },
    "math": {
        "problem": "What is $\\frac{1}{4}+\\frac{1}{2}$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "We get $\\frac{1}{4}+\\frac{2}{4}=\\boxed{\\frac{3}{4}}$.",
    },
    "math_500": {
        "problem": "Solve $x+1=3$.",
        "solution": "So $x=\\boxed{2}$.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "deepmath": {
        "question": "Evaluate $\\lim_{x\\to 0}\\frac{\\sin x}{2x}$.",
        "final_answer": "\\dfrac{1}{2}",
        "difficulty": 4.5,
        "topic": "Mathematics -> Calculus",
        "r1_solution_1": "It is $\\boxed{\\frac12}$.",
        "r1_solution_2": "It is $\\boxed{0.5}$.",
        "r1_solution_3": "It is $\\boxed{\\frac12}$.",
    },
    "dapo": {
        "data_source": "math_dapo",
        "prompt": [
            {
                "content": "Solve the following math problem step by step. The last line of your response should be of "
                "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is "
                '$17\\cdot 2$?\n\nRemember to put your answer on its own line after "Answer:".',
                "role": "user",
            }
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    },
    "deepscaler": {
        "problem": "Find the area of a circle of radius $2$.",
        "answer": "4\\pi",
        "solution": "It is $\\pi r^2 = 4\\pi$.",
    },
    "aime_2024": {
        "id": 60,
        "problem": "Find the number of minutes.",
        "solution": "The answer is $\\boxed{204}$.",
        "answer": "204",
        "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
        "year": "2024",
    },
}

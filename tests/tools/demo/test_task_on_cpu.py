# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's task: worked solutions, grading, splits and verl's parquet schema."""

from dataclasses import replace

import pyarrow.parquet
import pytest

from jetrl_verl.tools.demo import task
from jetrl_verl.tools.demo.task import Problem, TaskConfig, compute_score, make_splits, write_parquet

SMALL = TaskConfig(digits=3, warmup=400, train=200, test=100)


def test_solution_writes_every_carry():
    assert Problem(8737, 7219).solution == "7+9+0=16\n3+1+1=05\n7+2+0=09\n8+7+0=15\n#### 15956"
    assert Problem(9999, 1001).solution == "9+1+0=10\n9+0+1=10\n9+0+1=10\n9+1+1=11\n#### 11000"


@pytest.mark.parametrize(
    "response,score,formatted",
    [
        ("#### 12", 1.0, 1.0),
        ("5+7+0=12\n#### 12", 1.0, 1.0),
        ("wrong steps do not matter\n#### 12\n", 1.0, 1.0),
        (Problem(5, 7).solution, 1.0, 1.0),
        ("#### 13", 0.0, 1.0),
        ("#### 012", 0.0, 1.0),
        ("#### 12 or so", 0.0, 0.0),
        ("12", 0.0, 0.0),
        ("#### 12\n#### 13", 0.0, 1.0),
        ("#### 12\n5+7", 0.0, 0.0),
        ("### 12", 0.0, 0.0),
        ("#### -12", 0.0, 0.0),
        ("#### 1" + "2" * 5000, 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_only_the_last_line_decides(response, score, formatted):
    assert compute_score(task.DATA_SOURCE, response, "12") == {"score": score, "acc": score, "formatted": formatted}


def test_splits_share_no_problem_in_either_order():
    splits = make_splits(SMALL)
    keys = [(min(p.a, p.b), max(p.a, p.b)) for problems in splits.values() for p in problems]
    assert len(keys) == len(set(keys)) == 700
    assert {name: len(problems) for name, problems in splits.items()} == {"warmup": 400, "train": 200, "test": 100}
    assert all(100 <= number <= 999 for pair in keys for number in pair)


def test_more_training_data_does_not_change_the_held_out_split():
    assert make_splits(replace(SMALL, warmup=800, train=300))["test"] == make_splits(SMALL)["test"]


def test_more_problems_than_exist_are_refused():
    with pytest.raises(ValueError, match="only 45 exist"):
        TaskConfig(digits=1, warmup=40, train=4, test=4)


def test_parquet_has_verl_schema(tmp_path):
    problems = make_splits(SMALL)["test"]
    write_parquet(problems, "test", tmp_path / "test.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "test.parquet").to_pylist()
    assert len(rows) == 100
    assert rows[3] == {
        "data_source": "jetrl/addition",
        "prompt": [{"role": "user", "content": problems[3].prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problems[3].answer},
        "extra_info": {"index": 3, "split": "test"},
    }

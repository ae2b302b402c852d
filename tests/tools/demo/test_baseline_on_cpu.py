# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's baseline with a real engine: every policy is measured with its own weights."""

import json
import subprocess
import sys

import pytest
import torch

from jetrl_verl.tools.demo import baseline
from jetrl_verl.tools.demo.policy import PolicyConfig, build_model, build_tokenizer, save_policy
from jetrl_verl.tools.demo.task import TaskConfig, make_splits, write_parquet
from jetrl_verl.tools.diff.run import engine_environment


@pytest.mark.timeout(600)
def test_the_engine_measures_one_policy_after_another(tmp_path):
    tokenizer = build_tokenizer()
    for seed in (1, 2):
        model = build_model(PolicyConfig(layers=1, seed=seed), tokenizer)
        # Far from uniform: with wrong weights the mismatch is large.
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
        save_policy(model, tokenizer, tmp_path / str(seed))
    write_parquet(make_splits(TaskConfig(warmup=1, train=1, test=8))["test"], "test", tmp_path / "test.parquet")
    policies = [(1, str(tmp_path / "1")), (5, str(tmp_path / "2")), (9, str(tmp_path / "1"))]
    out = tmp_path / "metrics.jsonl"
    request = baseline.BaselineRequest(policies, str(tmp_path / "test.parquet"), 8, 24, str(out))
    request.write(tmp_path / "request.json")
    command = [sys.executable, "-m", baseline.__name__, str(tmp_path / "request.json")]
    subprocess.run(command, check=True, env=engine_environment(cuda=False))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 5, 9]
    k3_kls = [record["data"][baseline.METRIC] for record in records]
    assert all(0 < k3_kl < 0.05 for k3_kl in k3_kls), k3_kls

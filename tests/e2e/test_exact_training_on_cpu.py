# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Zero mismatch for real: verl, Ray and vLLM on this machine's CPU under ``precision=jet_fp8_exact``.

verl's own metrics are the judges. Every figure is compared with exactly zero: the two sides run one function.
"""

import json
from pathlib import Path

import pytest
from rich.console import Console

from jetrl_verl.demo import cache
from jetrl_verl.demo.run import DemoOptions, run_demo

CACHE = Path(__file__).parents[2] / "outputs" / "cache"
STEPS = 3


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[dict]:
    """Metrics of each step of a run whose batches are cut differently in every phase."""
    recipe = cache.Recipe()
    if cache.find(recipe, CACHE) is None:
        cache.make(recipe, CACHE, "cpu", print)
    out = tmp_path_factory.mktemp("exact")
    overrides = (
        "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.temperature=0.8",
        # One optimiser step a batch, so that every ratio is the first mini-batch's; three micro-batches, not of the
        # size that the old log-probabilities were computed in.
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.max_num_batched_tokens=256",
        "actor_rollout_ref.rollout.max_num_seqs=48",
    )
    status = run_demo(DemoOptions("jet_fp8_exact", STEPS, out, CACHE, "cpu", overrides), Console(width=160))
    (folder,) = out.iterdir()
    assert status == 0, (folder / "run.log").read_text()[-3000:]
    lines = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout_corr/k3_kl" in line]


@pytest.mark.parametrize(
    "metric",
    [
        "rollout_corr/k3_kl",
        "rollout_corr/kl",
        "rollout_corr/log_ppl_abs_diff",
        "training/rollout_probs_diff_max",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
    ],
)
def test_trainer_and_rollout_agree_in_every_bit_at_every_step(steps, metric):
    assert [step[metric] for step in steps] == [0.0] * STEPS


def test_the_policy_moves_between_the_steps(steps):
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert len({step["actor/entropy"] for step in steps}) == STEPS

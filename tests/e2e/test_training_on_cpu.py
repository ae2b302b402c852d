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
"""The main job for real: verl, Ray and vLLM on this machine's CPU, a few steps under two precisions, resume, merge.

One warmed-up policy (the demo's, cached beside its outputs) serves all runs. Each start of verl and vLLM takes one to
two minutes on two cores, so a run answers as many questions as it can.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl_verl.demo import cache
from jetrl_verl.demo.run import DemoOptions, run_demo
from jetrl_verl.train.checkpoint_export import ExportOptions, export

CACHE = Path(__file__).parents[2] / "outputs" / "cache"
STEPS = 3
LEARNING_RATE = 1e-5
"""Moves weights but hardly the policy: k3_kl falls as a policy grows certain, and the precisions are to be compared on
one policy, over all steps, since a mean of k3_kl over a single step of 11,000 tokens is too noisy."""
SYNC = re.compile(
    r"jetrl weight sync: loaded in ([\d.]+) s, contract of (\d+) quantised and (\d+) BF16 tensors held in ([\d.]+) s, "
    r"0 not compared, live digest (0x\w+)"
)


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    metrics: list[dict]
    syncs: list[tuple[str, ...]]
    log: str

    def mean(self, name: str) -> float:
        return fmean(step[name] for step in self.metrics if name in step)


@pytest.fixture(scope="module")
def policy() -> cache.Prepared:
    recipe = cache.Recipe()
    return cache.find(recipe, CACHE) or cache.make(recipe, CACHE, "cpu", print)


def train(precision: str, out: Path, steps: int, *overrides: str) -> Run:
    console = Console(width=160)
    fixed = ("trainer.val_before_train=False", f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}")
    options = DemoOptions(precision, steps, out, CACHE, "cpu", (*fixed, *overrides))
    status = run_demo(options, console)
    (folder,) = out.iterdir()
    log = (folder / "run.log").read_text()
    assert status == 0, log[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run([line["data"] for line in lines if "rollout_corr/k3_kl" in line["data"]], SYNC.findall(log), log)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def jet(policy, checkpoints, tmp_path_factory) -> Run:
    return train(
        "jet_fp8",
        tmp_path_factory.mktemp("jet_fp8"),
        STEPS,
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={checkpoints}",
    )


@pytest.fixture(scope="module")
def fp8_rollout(policy, tmp_path_factory) -> Run:
    return train("fp8_rollout", tmp_path_factory.mktemp("fp8_rollout"), STEPS)


def test_every_sync_held_the_contract_and_changed_the_rollouts_weights(jet):
    """Once before the first step and once after each; the digest is of what the live parameters hold."""
    assert len(jet.metrics) == STEPS
    assert len(jet.syncs) == STEPS + 1
    assert {(quantised, plain) for _, quantised, plain, _, _ in jet.syncs} == {("14", "11")}
    assert len({digest for *_, digest in jet.syncs}) == STEPS + 1


def test_sync_and_contract_check_cost_under_one_percent_of_a_step(jet):
    """Both sides: the trainer's quantisation and sums lie in its stream, the rollout's sums are timed by themselves."""
    checks = [float(check) for _, _, _, check, _ in jet.syncs[1:]]
    assert fmean(checks) + jet.mean("actor/jetrl/sync_seconds") < 0.01 * jet.mean("timing_s/step")


def test_codes_are_a_fraction_of_the_stock_wire(jet):
    megabytes, stock = jet.mean("actor/jetrl/sync_megabytes"), jet.mean("actor/jetrl/sync_stock_megabytes")
    assert megabytes < 0.3 * stock


def test_unified_flow_halves_the_mismatch_of_fp8_rollout_alone(jet, fp8_rollout):
    """Both roll out in the same FP8; they differ in the trainer's linears alone."""
    unified, rollout_only = jet.mean("rollout_corr/k3_kl"), fp8_rollout.mean("rollout_corr/k3_kl")
    print(f"k3_kl: jet_fp8 {unified:.2e}, fp8_rollout {rollout_only:.2e}")
    assert 0 < unified < rollout_only / 2
    assert len({digest for *_, digest in fp8_rollout.syncs}) == STEPS + 1


def test_training_resumes_from_the_checkpoint(jet, checkpoints, tmp_path_factory):
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    resumed = train(
        "jet_fp8",
        tmp_path_factory.mktemp("resumed"),
        STEPS + 1,
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
    )
    assert len(resumed.metrics) == 1, "one step is left after the checkpoint"
    # The first sync after the resume carries the weights that the last one before it carried.
    assert resumed.syncs[0][-1] == jet.syncs[-1][-1]


def test_the_export_is_what_the_rollout_last_held(jet, checkpoints, tmp_path):
    (exported,) = export(checkpoints, tmp_path / "fp8", ExportOptions("fp8"))
    assert f"{exported.digest:#018x}" == jet.syncs[-1][-1]


def test_the_merger_writes_a_folder_that_transformers_loads(jet, policy, checkpoints, tmp_path):
    actor = checkpoints / f"global_step_{STEPS}" / "actor"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(tmp_path / "merged")]
    subprocess.run(command, check=True, env={**os.environ, "VERL_PLATFORM": "cpu"})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer) == merged.config.vocab_size
    before = load_file(next(Path(policy.policy).glob("*.safetensors")))
    after = merged.state_dict()
    assert before.keys() == after.keys()
    changed = sum((after[name] - before[name].float()).abs().sum().item() for name in before)
    assert 0 < changed < float("inf")
    assert merged(torch.arange(8)[None]).logits.isfinite().all()

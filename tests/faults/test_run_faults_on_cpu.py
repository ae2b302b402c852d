# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What run_faults.py asks of verl, on every kind of machine, and what it calls wrong; its runs take minutes each."""

import json
import os
import subprocess
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import run_faults
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from fault_injector import AT_ITS_END, IN_THE_PHASE
from hydra import compose, initialize_config_module
from hydra_files import parsed_once  # noqa: F401  (for every test of this file)
from run_faults import Outcome

from jetrl_verl.tools.demo.cache import Prepared
from jetrl_verl.tools.launch import RunPaths
from jetrl_verl.tools.provenance import provenance


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_of_several_ranks_composes_and_its_batches_divide(device, ranks, tmp_path):
    paths, prepared = RunPaths(tmp_path), Prepared(tmp_path, {})
    words = run_faults.job("jet_fp8", prepared, paths, device, ranks, 3, tmp_path / "it's here")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.trainer.default_local_dir == str(tmp_path / "it's here")
    assert config.trainer.n_gpus_per_node == ranks and rollout.tensor_model_parallel_size == min(2, ranks)
    sequences = config.data.train_batch_size * rollout.n
    assert sequences == actor.ppo_mini_batch_size * rollout.n  # one optimizer step a batch
    micro_batches = 2 if device == "cpu" else 16
    assert sequences == ranks * micro_batches * actor.ppo_micro_batch_size_per_gpu
    assert sequences == ranks * rollout.log_prob_micro_batch_size_per_gpu
    assert config.data.max_prompt_length + config.data.max_response_length <= rollout.max_model_len <= 256
    assert (config.ray_kwargs.ray_init.get("num_gpus") == ranks) == (device == "cpu")


KILLED = Outcome("trainer-update", 1, 6.0, 2, 2, ["died"], [], 7.0, 5120, 9.0, 0, 2, IN_THE_PHASE)
RESUMED = Outcome("resumed", 0, 60.0, 3, 3, [], [], 61.0, 5120, 62.0, 0, 3)
REFUSED = replace(RESUMED, name="truncated", status=1, first=None, last=None, errors=["x.pt is damaged (...)"])


def test_a_chain_that_resumed_where_it_was_broken_is_right():
    chain = [KILLED, REFUSED, RESUMED, replace(RESUMED, name="two-runs-1", first=1, last=2)]
    assert run_faults.faults_of(chain) == run_faults.lost(chain) == []
    row = "| trainer-update | 6 s (in the phase) | 1 | 2..2 | 2 | 7 s, 9 s (5.0 GiB) | died |"
    assert row in run_faults.table(chain)


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (replace(KILLED, status=None), "trainer-update hung"),
        (replace(KILLED, left=["7 ray"], gone=None), "trainer-update left 7 ray"),
        (replace(KILLED, freed=None, held=900), "trainer-update left 900 MiB of a GPU"),
        (replace(KILLED, most=0), "trainer-update: nvidia-smi never saw that it held memory of a GPU"),
        (replace(RESUMED, most=0), "resumed: nvidia-smi never saw that it held memory of a GPU"),
        (replace(KILLED, killed=AT_ITS_END), "trainer-update: the phase ended before the kill"),
        (replace(KILLED, killed=None), "trainer-update: nothing was killed"),
        (replace(KILLED, status=0), "trainer-update ended as if nothing had happened"),
        (replace(REFUSED, status=0), "truncated ended as if nothing had happened"),
        (replace(REFUSED, errors=["Ray did not start"]), "truncated did not say 'is damaged'"),
        (replace(RESUMED, status=1), "resumed ended with status 1"),
    ],
)
def test_what_no_run_may_do_is_named(outcome, sentence):
    assert sentence in run_faults.faults_of([outcome])


def test_a_step_that_was_lost_is_named():
    assert run_faults.lost([KILLED, replace(RESUMED, first=2)]) == [
        "resumed began with step 2 behind trainer-update, saved 2"
    ]
    assert run_faults.lost([replace(KILLED, saved=1), replace(RESUMED, first=2)]) == [
        "trainer-update trained 2 steps and saved 1"
    ]


def test_faults_are_dealt_among_chains_that_end_with_a_resume():
    faults = ["resized", "trainer-sync", "resumed", "driver-update", "rollout-sync"]
    assert run_faults.dealt(faults, 2) == [
        ["rollout-sync", "resized", "resumed"],
        ["trainer-sync", "driver-update", "resumed"],
    ]
    assert run_faults.dealt(faults[:1], 4) == [["resized", "resumed"]]


class StandIn:
    """A chain whose runs end at once."""

    def __init__(self, saved: int) -> None:
        self.saved = saved

    def run(self, name: str, steps: int) -> Outcome:
        self.saved += 1
        return replace(RESUMED, name=name, first=self.saved, last=self.saved, saved=self.saved)


def test_what_needs_a_checkpoint_gets_one(monkeypatch):
    monkeypatch.setattr(run_faults, "resized", lambda chain: [chain.run("resized-resumed", chain.saved + 1)])
    assert [each.name for each in run_faults.outcomes_of("resized", StandIn(0))] == ["resumed", "resized-resumed"]
    assert [each.name for each in run_faults.outcomes_of("resized", StandIn(3))] == ["resized-resumed"]


def test_chains_at_once_are_judged_one_by_one(tmp_path, capsys):
    """Each begins with step 1; what one of them did not take fails all, whatever it took in a call before."""
    facts = {"device": "cpu", "gpus": 2, "precision": "jet_fp8", "words": [], "build": provenance()}
    records = [tmp_path / name / run_faults.RECORD for name in ("chain-1", "chain-2", "chain-3")]
    for record in records[:2]:
        record.parent.mkdir()
        record.write_text("\n".join(json.dumps({**asdict(outcome), **facts}) for outcome in (KILLED, RESUMED)))
    assert run_faults.said(records[:2]) == 0
    assert "Nothing hung" in capsys.readouterr().out
    assert list(run_faults.not_taken(records[0], ["trainer-update", "resumed"], 0)) == []
    missing = [*run_faults.not_taken(records[1], ["resized", "resumed"], 1)]
    missing += run_faults.not_taken(records[2], ["nan"], 0)
    assert [sentence.partition(";")[0] for sentence in missing] == [
        "chain-2 left no outcome of resized",
        "chain-3 left no outcome of nan",
    ]
    assert run_faults.said(records, missing) == 1
    assert "wrong: chain-3 left no outcome of nan" in capsys.readouterr().out


def test_a_hung_run_has_no_word_on_memory():
    hung = replace(KILLED, status=None, held=None, freed=None, gone=None)
    assert "None" not in run_faults.table([hung]).replace("| None |", "")


def test_memory_is_that_of_the_runs_own_processes(monkeypatch):
    """Also of one that has ended, not of another that has its id."""
    (own, other) = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    seen = {process.pid: psutil.Process(process.pid) for process in (own, other)}
    answer = f"{own.pid}, 300\n{other.pid}, 20\n{os.getpid()}, 1\n"
    run, said = subprocess.run, [answer]

    def smi(command, **options):
        return SimpleNamespace(stdout=said[0]) if command[0] == "nvidia-smi" else run(command, **options)

    monkeypatch.setattr(subprocess, "run", smi)
    try:
        assert run_faults.gpu_memory("cpu", seen) is None
        assert run_faults.gpu_memory("cuda", {}) == 0
        assert run_faults.gpu_memory("cuda", seen) == 320
        own.kill()
        own.wait(10)
        assert run_faults.gpu_memory("cuda", seen) == 320
        monkeypatch.setattr(seen[other.pid], "is_running", lambda: False)
        assert run_faults.gpu_memory("cuda", seen) == 300
        said[0] = f"{own.pid}, [N/A]\n"
        with pytest.raises(SystemExit, match=r"'\[N/A\]' of what a process holds here. Use GPUs without MIG or vGPU."):
            run_faults.gpu_memory("cuda", seen)
    finally:
        for process in (own, other):
            process.kill()
            process.wait(10)

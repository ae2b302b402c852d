# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every cell of benchmarks/exact_over_ranks.py as verl reads it, and when a run counts as exact."""

import json
import math

import pytest
import verl.trainer.main_ppo  # noqa: F401  (the plugin registers itself through verl, as in a run)
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks import exact_over_ranks, verl_step
from benchmarks.exact_over_ranks import CELLS, PRECISIONS, Job, chosen, judged, main, that_fit
from benchmarks.published_shapes import PUBLISHED, tiny, write_model
from benchmarks.verl_runs import MISMATCH, NOT_FINITE, TIME_UP

EXACT = {"status": 0, "steps": 3, "moved": 3, "response_length": 2048.0, **dict.fromkeys(MISMATCH, 0.0)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("models")
    for name in {cell.model for cell in CELLS.values()}:
        write_model(tiny(PUBLISHED[name], ranks=2), folder / name)
    return {name: folder / name for name in {cell.model for cell in CELLS.values()}}


def composed(job: Job, name: str, precision: str, models):
    """The config of a run, after the checks of verl and of this project."""
    words = job.words(name, precision, models[CELLS[name].model])
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    validate_config(config, need_reference_policy(config), use_critic=False)
    for node in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.algorithm):
        omega_conf_to_dataclass(node)
    return config


@pytest.mark.parametrize("on_a_cpu", [False, True])
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_a_job_that_verl_accepts(name, precision, gpus, on_a_cpu, models, tmp_path):
    job = Job(tmp_path, gpus, 2, tiny=on_a_cpu)
    config = composed(job, name, precision, models)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.jetrl.precision == precision and config.trainer.n_gpus_per_node == gpus
    assert rollout.tensor_model_parallel_size == 2 and rollout.ignore_eos
    assert rollout.response_length == (24 if on_a_cpu else 2048) and config.trainer.total_training_steps == 3
    assert actor.strategy == ("fsdp" if name == "fsdp1" else "fsdp2")
    assert actor.ulysses_sequence_parallel_size == (gpus if name == "ulysses" else 1)
    assert actor.fsdp_config.fsdp_size == (gpus // 2 if name == "hsdp" else -1)
    assert actor.fsdp_config.param_offload is (name == "8b" and gpus < 4 and not on_a_cpu)
    assert config.actor_rollout_ref.model.use_remove_padding
    if not on_a_cpu:
        # Every micro-batch of an update is another one than those that the old log-probabilities were computed in.
        assert rollout.log_prob_max_token_len_per_gpu == 2 * actor.ppo_max_token_len_per_gpu
        assert actor.ppo_max_token_len_per_gpu > rollout.max_model_len
        assert OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes")


def test_the_cells_that_are_asked_for(tmp_path):
    assert chosen([]) == [(name, precision) for name in CELLS for precision in PRECISIONS]
    assert chosen(["hsdp", "8b:jet_fp8"]) == [("hsdp", "jet_fp8"), ("hsdp", "jet_fp8_exact"), ("8b", "jet_fp8")]
    for word in ("fsdp3", "fsdp2:bf16"):
        with pytest.raises(ValueError, match="Choose from"):
            chosen([word])


def test_a_shape_that_does_not_go_over_the_ranks_is_left_out_or_refused(tmp_path):
    job = Job(tmp_path, 4, 4)
    fitting = that_fit(job, chosen([]), named=False)
    assert {name for name, _ in fitting} == set(CELLS) - {"mixture"}
    with pytest.raises(ValueError, match="--tp 4 is not supported with qwen3_30b_a3b"):
        that_fit(job, chosen(["mixture"]), named=True)
    with pytest.raises(ValueError, match="Set a --tp that divides --gpus"):
        that_fit(Job(tmp_path, 3, 2), chosen([]), named=False)


def test_cells_fit_gpus_of_80_gb_and_the_small_ones_two_at_a_time(tmp_path):
    job = Job(tmp_path, 2, 2)
    plans = {name: job.plan(cell).peak for name, cell in CELLS.items()}
    assert max(plans.values()) < 75 and 2 * plans["fsdp2"] < 75
    assert plans["hsdp"] > plans["fsdp2"], "its replicas are not sharded over two"
    assert Job(tmp_path, 4, 2).plan(CELLS["hsdp"]).weights == pytest.approx(job.plan(CELLS["fsdp2"]).weights)


def test_a_run_is_exact_where_nothing_differs_and_nothing_is_missing():
    assert judged(EXACT, 2048)["exact"] == "yes" and "errors" not in judged(EXACT, 2048)


@pytest.mark.parametrize("name", MISMATCH)
@pytest.mark.parametrize("value", [1e-12, -1e-12, math.nan, NOT_FINITE, None, "absent"])
def test_a_difference_or_its_absence_is_no_exactness(name, value):
    found = {key: was for key, was in EXACT.items() if value != "absent" or key != name}
    found = judged(found if value == "absent" else found | {name: value}, 2048)
    assert found["exact"] == "no" and len(found["errors"]) == 1 and found["errors"][0].startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"moved": 2}, "1 of 3 steps had no gradient"),
        ({"steps": 2, "status": TIME_UP}, "2 of 3 steps were taken"),
        ({"response_length": 2047.0}, "were to have 2048"),
        ({"steps": 0, "status": 1}, "0 of 3 steps were taken"),
    ],
)
def test_a_run_that_did_not_do_what_it_was_to_do_is_not_exact(changed, words):
    found = judged({**EXACT, **changed}, 2048)
    assert found["exact"] == "no" and len(found["errors"]) == 1 and words in found["errors"][0]


PROGRAM = """
import json, sys
words = sys.argv[1:]
cell = words[words.index("--one") + 1].partition(":")[0]
found = {"status": 0, "steps": 3, "moved": 3, "exact": "no" if cell == DIFFERS else "yes"}
if cell == DIES: raise RuntimeError("out of memory")
json.dump(found, open(FOUND[words[words.index("--one") + 1]], "w"))
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Callable: exit status of a call on a CPU whose jobs are a program that trains nothing, and cells that it took."""
    job = Job(tmp_path, 2, 2, tiny=True)
    monkeypatch.setattr(verl_step, "prepare_data", lambda out, rows: None)
    monkeypatch.setattr(exact_over_ranks, "compile_bytecode", lambda console: lambda: None)
    planned, taken = Job.planned, []

    def stand_in(self, name, precision):
        run = planned(self, name, precision)
        taken.append(name)
        found = {f"{cell}:{one}": str(job.found(cell, one)) for cell, one in chosen([])}
        program = PROGRAM.replace("FOUND", repr(found)).replace("DIFFERS", repr("ulysses")).replace("DIES", repr("8b"))
        python, module = run.command[0], run.command[1:]
        return type(run)(run.name, [python, "-c", program, *module], run.found, run.log, run.gib)

    monkeypatch.setattr(Job, "planned", stand_in)

    def main_of(*words):
        taken.clear()
        return main([str(tmp_path), "--tiny", "--seconds", "100", *words]), list(taken)

    return main_of


def test_a_call_takes_what_is_left_and_its_status_is_the_verdict(call, tmp_path, capsys):
    assert call("fsdp2:jet_fp8", "hsdp:jet_fp8") == (0, ["fsdp2", "hsdp"])
    assert call("fsdp2:jet_fp8") == (0, [])
    assert call("fsdp2:jet_fp8", "ulysses:jet_fp8") == (1, ["ulysses"])
    assert call("ulysses:jet_fp8") == (1, []), "what differed is not taken again, and stays a failure"
    assert call("fsdp2:jet_fp8", "8b:jet_fp8") == (1, ["8b"])
    assert call("8b:jet_fp8")[1] == ["8b"], "what has not ended well is"
    assert call("fsdp2:jet_fp8", "--again") == (0, ["fsdp2"])
    held = json.loads((tmp_path / "exact_over_ranks.json").read_text())
    assert {(run["cell"], run["gpus"], run["tp"], run["exact"]) for run in held["runs"] if "exact" in run} == {
        ("fsdp2", 2, 2, "yes"),
        ("hsdp", 2, 2, "yes"),
        ("ulysses", 2, 2, "no"),
    }
    assert all(run["build"]["commit"] for run in held["runs"])


def test_too_many_gpus_stop_the_call_before_a_job_starts(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "--gpus", "9998", "--tp", "2"])
    assert "--gpus 9998 is not supported with the" in capsys.readouterr().err

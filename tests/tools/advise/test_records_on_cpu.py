# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions against recorded runs: every phase of those that no rate was fitted to is within 15%, or named here."""

import json

import pytest

from benchmarks import advise_rates, advise_steps, advise_sync
from benchmarks.pages import written
from jetrl_verl.config.support.scopes import ACTOR, ATTENTION, ROLLOUT
from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.tools.advise.rates import FILE, Rates, measured, rates_of
from jetrl_verl.tools.advise.shapes import KNOWN, model_of
from jetrl_verl.tools.bench.shapes import MODELS

RECORDS = advise_rates.records()
CHECKS = [record for record in RECORDS if not record.calibrates and not record.caveat]

NEW, REPLACED = "new", "replaced"
OFFLOAD = f"{ACTOR}.fsdp_config.param_offload"

MISSES = {
    "weight sync, verl, qwen3_4b, 64 x 4096, fp8_rollout": 0.215,
    "old log-probabilities, verl, qwen3_8b, 4 GPUs, TP 4, 64 x 2048, fp8_rollout, beside another job": -0.286,
    "weight sync, verl, qwen3_8b, 4 GPUs, TP 4, 64 x 2048, bf16": 0.526,
    "weight sync, verl, qwen3_8b, 4 GPUs, TP 4, 64 x 2048, fp8_rollout": 0.206,
    "weight sync, verl, qwen3_8b, 4 GPUs, TP 4, H100, 64 x 2048, jet_fp8": 0.159,
    "generation, verl, gsm8k, 4 GPUs, 64 x 5, jet_fp8": -0.181,
}
"""Records that are not within the bar, and by how much the prediction is off. docs/advise.md says why."""


def name(record) -> str:
    return f"{record.phase}, {record.case}"


@pytest.mark.parametrize("record", CHECKS, ids=name)
def test_a_record_that_no_rate_was_fitted_to_is_predicted_within_15_percent(record):
    error = record.error(measured())
    if name(record) in MISSES:
        assert error == pytest.approx(MISSES[name(record)], abs=0.01), f"{name(record)} is off by {error:+.1%} now"
        assert abs(error) > advise_rates.BAR
    else:
        assert abs(error) <= advise_rates.BAR, f"predicted {record.predict(measured()):.4g}, not {record.measured:.4g}"


def test_every_miss_is_a_record_and_every_record_has_a_case_of_its_own():
    names = [(name(record), record.source, record.measured) for record in RECORDS]
    assert len(set(names)) == len(names)
    assert MISSES.keys() <= {name(record) for record in CHECKS}


def test_every_phase_of_a_step_is_checked_by_a_record_that_no_rate_was_fitted_to():
    phases = {record.phase for record in CHECKS}
    assert phases >= {"generation", "old log-probabilities", "update", "weight sync", "step", "decode step", "memory"}


def test_the_rates_of_the_package_are_those_that_the_records_give():
    fitted = advise_rates.fit()
    found = json.loads(FILE.read_text())["rates"]
    assert found.keys() == fitted.keys()
    for key, entry in fitted.items():
        assert found[key]["value"] == pytest.approx(entry["value"], rel=1e-5), key
        assert found[key]["unit"] == entry["unit"] and found[key]["from"] == entry["from"] and entry["from"], key


def test_the_rates_name_the_builds_of_their_records():
    """And only those: a record that is measured again with its build is no longer looked up in the log."""
    fitted = advise_rates.fit()
    found = json.loads(FILE.read_text())["builds"]
    assert found == advise_rates.builds(fitted)
    by_log = {f"{file} (log: {commit})" for file, commit in advise_rates.COMMITS_BY_LOG.items()}
    assert by_log == {key for key, made_by in found.items() if None in made_by}
    # What follows from no record follows from a rate that does.
    for key, entry in fitted.items():
        assert (
            any(one.partition(" ")[0] in entry["from"] for one in found)
            or "stock" in entry["from"]
            or (entry["from"].startswith("as "))
        ), key


def test_a_report_says_that_rates_are_of_several_builds_in_one_line():
    one, other = ({"commit": c * 40, "dirty": False, "sources_sha256": c, "kernel_library_sha256": c} for c in "ab")
    rates = Rates({}, builds={"a.json": [one], "b.json": [other], "c.json (log: cccc)": [None]})
    note = rates.including({"x": 1.0}).builds_note()
    assert note.startswith("Results of 3 builds side by side; a difference may come from the code.")
    assert "kernel library b: b.json" in note and "no commit recorded: c.json (log: cccc)" in note
    assert Rates({}, builds={"a.json": [one], "b.json": [one]}).builds_note().startswith("Build: commit aaaaaaaaaa")


def test_the_page_has_the_table_of_these_rates():
    assert written(advise_rates.PAGE.read_text()).splitlines() == advise_rates.table(measured()).splitlines()


def test_calibration_is_no_majority():
    assert sum(record.calibrates for record in RECORDS) < len(CHECKS) / 1.5


@pytest.fixture
def steps(tmp_path):
    """A file of benchmarks/verl_step.py with four rows; the figures are made up."""
    figures = {
        "steps": 3,
        "status": 0,
        "prompt_length": 150.0,
        "response_length": 4096.0,
        "gen_s": 40.0,
        "step_s": 90.0,
    }
    figures |= {"old_log_prob_s": 8.0, "update_actor_s": 30.0, "update_weights_s": 0.4, "engine_tokens_per_s": 7000.0}
    varlen = f"++{ATTENTION}={JETRL_ATTENTION}"
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    runs = [
        {"model": "qwen3_4b", "response": 4096, "row": "bf16", "words": [], **figures},
        {"model": "qwen3_1_7b", "response": 16384, "row": "jet_fp8_exact", "words": [varlen, offload], **figures},
        {"model": "qwen3_4b", "response": 4096, "row": "verl_fp8", "words": [], **figures},
        {"model": "qwen3_4b", "response": 4096, "row": "bf16_best", "status": None, "errors": ["not run"]},
    ]
    file = tmp_path / "verl_step.json"
    build = {"commit": "f" * 40, "sources_sha256": "f" * 64}
    file.write_text(json.dumps({"build": build, "sequences": 64, "memory": 0.45, "tiny": False, "runs": runs}))
    return file


def test_runs_of_the_benchmark_of_steps_are_records_that_check(steps):
    found = list(advise_steps.step_records([steps]))
    assert not any(record.calibrates for record in found)
    assert {record.case for record in found if not record.caveat} == {
        "verl, qwen3_4b, 64 x 4096, bf16",
        "verl, qwen3_4b, 64 x 4096, bf16, the engine alone",
        "verl, qwen3_1_7b, 64 x 16384, jet_fp8_exact",
        "verl, qwen3_1_7b, 64 x 16384, jet_fp8_exact, the engine alone",
    }
    bf16 = {record.phase: record for record in found if record.case == "verl, qwen3_4b, 64 x 4096, bf16"}
    assert bf16.keys() == {"generation", "old log-probabilities", "update", "weight sync", "step"}
    assert bf16["step"].measured == 90.0 and bf16["update"].measured == 30.0
    parts = sum(bf16[phase].predict(measured()) for phase in bf16 if phase != "step")
    assert parts < bf16["step"].predict(measured()) < 1.1 * parts, "the rest of a step is under no phase"
    # What waits for the host is not what is predicted; generation is.
    assert [record.phase for record in found if "jet_fp8_exact" in record.case and not record.caveat] == [
        "generation"
    ] * 2
    assert advise_rates.table(measured(), found).count("| not comparable |") == 4


def test_a_build_whose_rollout_has_been_replaced_is_not_comparable_whatever_its_file(steps):
    """And a run that is taken again, in the same file, is."""
    found = json.loads(steps.read_text())
    before = {"commit": "f" * 40, "sources_sha256": advise_steps.OLD_ROLLOUT.sources[0] + "f" * 56}
    found["runs"] = [run | {"words": [], "build": before} for run in found["runs"][:2]]
    found["runs"].append(found["runs"][1] | {"build": found["build"], "model": "qwen3_4b"})
    steps.write_text(json.dumps(found))
    said = {(record.case, record.phase) for record in advise_steps.step_records([steps]) if record.caveat}
    # BF16's rollout, trainer and weight sync are vLLM's and verl's own.
    case = "verl, qwen3_1_7b, 64 x 16384, jet_fp8_exact"
    assert advise_steps.OLD_ROLLOUT.sources[0] in {*advise_steps.OLD_SYNC.sources} & {*advise_steps.OLD_LOGITS.sources}
    phases = {"generation", "old log-probabilities", "update", "weight sync", "step"}
    assert said == {*((case, phase) for phase in phases), (f"{case}, the engine alone", "generation")}


def test_code_that_was_replaced_is_told_by_the_sum_of_sources():
    """A tree with changes has the commit that it was changed from, as several records here have."""
    steps = [(REPLACED, "verl_step_packed_4k_h200"), (REPLACED, "decode_kv_cache_h200"), (NEW, "weight_sync_h200")]
    for code, file in steps:
        build = json.loads((advise_rates.ROOT / f"benchmarks/results/{file}.json").read_text())
        build = build.get("build") or build["runs"][0]["build"]
        assert bool(advise_steps.OLD_ROLLOUT.in_build(build)) == (code == REPLACED), file
    assert "4f3bcb0" in advise_steps.OLD_SYNC.in_build(build), "the last one, whose rollout is the one of now"


def fitted_as_of(monkeypatch, sources: str) -> dict:
    """The rates, had these sources been those of the sync that was timed."""
    timed = {**advise_sync.recorded(advise_sync.TIMED)}
    timed["build"] = timed["build"] | {"sources_sha256": sources}
    monkeypatch.setattr(advise_sync, "recorded", lambda name, stock=advise_sync.recorded: (
        timed if name == advise_sync.TIMED else stock(name)
    ))  # fmt: skip
    return advise_rates.fit()


def test_rates_of_code_that_was_replaced_say_so_in_the_report(monkeypatch):
    """As the rates of a sync did until it was measured again."""
    assert measured().older == {} and measured().older_note() == ""
    rates = rates_of(fitted_as_of(monkeypatch, advise_steps.OLD_SYNC.sources[0] + "f" * 56))
    assert set(rates.older) == {"sync.ours.launch", "sync.probes"}
    note = rates.including({"x": 1.0}).older_note()
    assert note.startswith("Rates of code that has been replaced since: sync.ours.launch, sync.probes: a weight sync")
    assert Rates({}).older_note() == ""


def test_a_sync_measured_again_by_other_sources_is_not_old(monkeypatch):
    assert not any("older" in entry for entry in fitted_as_of(monkeypatch, "f" * 64).values())


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=4096"], "micro_tokens", 4096),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=3"], "gpus", 6),
        ([f"+{ATTENTION}=sdpa"], "varlen", False),
        ([f"~{ATTENTION}"], "varlen", False),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.1"], "utilization", 0.1),
    ],
)
def test_of_a_word_that_is_given_twice_the_last_one_counts(steps, more, field, value):
    settings = json.loads(steps.read_text())
    words = [
        *(f"{ACTOR}.ppo_max_token_len_per_gpu=16384", "trainer.n_gpus_per_node=1"),
        *(f"++{ATTENTION}={JETRL_ATTENTION}", f"{ROLLOUT}.gpu_memory_utilization=0.45"),
    ]
    first, last = (
        advise_steps._job_of_run(settings["runs"][0] | {"words": w}, settings) for w in (words, words + more)
    )
    assert getattr(last, field) == value != getattr(first, field)
    assert advise_steps.offloads(advise_steps.given(["a=1", f"{OFFLOAD}=False", f"++{OFFLOAD}=true"]))
    assert not advise_steps.offloads(advise_steps.given([f"{OFFLOAD}=True", f"{OFFLOAD}=False"]))


def test_steps_of_a_tiny_model_are_no_records(steps):
    steps.write_text(json.dumps(json.loads(steps.read_text()) | {"tiny": True}))
    with pytest.raises(ValueError, match="a tiny model on a CPU"):
        list(advise_steps.step_records([steps]))


def test_a_run_of_the_benchmark_of_steps_is_the_job_that_it_was(steps):
    settings = json.loads(steps.read_text())
    flash, varlen = (advise_steps._job_of_run(run, settings) for run in settings["runs"][:2])
    assert (flash.sequences, flash.prompt, flash.response, flash.varlen) == (64, 150.0, 4096, False)
    assert varlen.varlen and varlen.micro_tokens == 512 + 16384 and varlen.model.name == "qwen3_1_7b"


@pytest.mark.parametrize("model", MODELS)
def test_a_known_shape_has_the_linears_that_the_benchmarks_time(model):
    sizes = model_of(model, KNOWN[model])
    assert [(n, k) for n, k, _ in sizes.linears] == list(MODELS[model].values())
    assert all(quantized for _, _, quantized in sizes.linears)

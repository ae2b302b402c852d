# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise --gpu``: another GPU's memory, and what of a prediction goes by its bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.advise_steps import key_of
from jetrl_verl.cli import app
from jetrl_verl.tools.advise.gpus import BY_BYTES, GPUS
from jetrl_verl.tools.advise.job import Job
from jetrl_verl.tools.advise.predict import precisions, predict
from jetrl_verl.tools.advise.rates import FILE, measured
from jetrl_verl.tools.advise.report import CONTEXTS, warnings
from jetrl_verl.tools.advise.shapes import KNOWN, model_of
from jetrl_verl.tools.advise.trainer import JET, STOCK, forward

ROOT = Path(__file__).parents[3]
EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])


def advise(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["advise", *words])
    return result.exit_code, result.output


def test_on_an_h100_what_goes_by_bytes_of_memory_takes_longer_and_nothing_else():
    ours, theirs = measured(), measured().on("h100")
    times = theirs["bandwidth"] / ours["bandwidth"]
    assert 0.65 < times < 0.75, "3.35 and 4.8 TB/s, by their maker"
    names = json.loads(FILE.read_text())["rates"]
    between = {name for name in names if name.startswith(("between.", "prefill."))}
    assert {name for name in names if theirs[name] != ours[name]} == {*BY_BYTES, *between}
    assert all(theirs[name] / ours[name] == pytest.approx(times) for name in BY_BYTES)
    assert {names[name]["unit"] for name in BY_BYTES} == {"B/s"}
    assert {name for name in names if names[name]["unit"] == "B/s"} == {*BY_BYTES, "h100.bandwidth"}
    assert ours.on("h200") is ours and theirs.on("h100") is theirs
    with pytest.raises(ValueError, match="no other GPU's"):
        theirs.on("h200")


def test_what_lies_between_gemms_takes_its_own_times_as_long():
    """Neither as much longer as bytes do, nor as long as on an H200: the records of layers are between the two."""
    ours, theirs = measured(), measured().on("h100")
    assert 1 < ours["h100.between"] < ours["bandwidth"] / theirs["bandwidth"]
    for flow in (STOCK, JET):
        passes = [forward(rates, EIGHT, flow, 8192.0, 512.0) for rates in (ours, theirs)]
        assert passes[1].between / passes[0].between == pytest.approx(ours["h100.between"])
        assert (passes[1].gemm, passes[1].attention) == (passes[0].gemm, passes[0].attention)


def test_an_h100_has_less_memory_for_the_cache_and_the_trainer():
    job = Job(EIGHT, 64, 4, 256.0, 2048.0, 512, 4096, gpus=8, tp=1)
    (precision,) = [each for each in precisions(job, True) if each.name == "jet_fp8"]
    large, small = (predict(measured(), replace(job, gpu=gpu), precision) for gpu in ("h200", "h100"))
    less = GPUS["h200"].memory - GPUS["h100"].memory
    assert large.rollout.cache - small.rollout.cache == pytest.approx(0.5 * less)
    assert small.trainer == large.trainer and small.step > 1.05 * large.step
    one = replace(job, gpus=1, eight_bit=True)
    said = {
        gpu: " ".join(warnings(on, [predict(measured(), on, precision)]))
        for gpu, on in ((gpu, replace(one, gpu=gpu)) for gpu in GPUS)
    }
    assert "of a GPU's 79 under" in said["h100"] and "of a GPU's" not in said["h200"]


def test_what_processes_take_beside_trainer_and_rollout_counts_as_well():
    """A share of the memory that leaves room for the trainer's state alone is too large."""
    job = Job(EIGHT, 64, 4, 256.0, 2048.0, 512, 4096, gpus=8, gpu="h100")
    (precision,) = [each for each in precisions(job, True) if each.name == "jet_fp8"]

    def said(share: float) -> str:
        on = replace(job, utilization=share)
        return " ".join(warnings(on, [predict(measured(), on, precision)]))

    state = predict(measured(), job, precision).trainer.state
    room = 1 - (state + CONTEXTS) / job.gpu_bytes
    assert "exceed a GPU" not in said(room - 0.005)
    assert f"lower it to {int(100 * room) / 100:.2f}." in said(room + 0.005)


def test_the_command_says_which_gpu_and_what_is_assumed_of_it():
    sizes = ("--model", "qwen3-8b", "--gpus", "4", "--response-length", "2048")
    code, text = advise(*sizes, "--gpu", "h100")
    assert code == 0 and "4 x NVIDIA H100 80GB HBM3, rollout TP 1" in text
    assert "Assumed: on an NVIDIA H100 80GB HBM3 bytes of the GPU's memory take 1.40 times an H200's seconds" in text
    code, text = advise(*sizes)
    assert code == 0 and "4 x NVIDIA H200, rollout TP 1" in text and "Assumed: on an" not in text
    code, text = advise(*sizes, "--gpu", "b200")
    assert code == 1 and "no prediction for the GPU b200; choose --gpu h200 or h100" in text


@pytest.mark.parametrize("words", [("--model", "qwen3-8b"), ("--script", "recipes/gsm8k/run_qwen3_8b.sh")])
def test_options_and_a_recipes_words_are_predicted_on_it(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {}
    for gpu in GPUS:
        code, text = advise(*words, "--gpu", gpu, "--json")
        assert code == 0
        found[gpu] = json.loads(text)
    assert [found[gpu]["job"]["gpu"] for gpu in GPUS] == list(GPUS)
    for name, slower in found["h100"]["precisions"].items():
        assert slower["step_s"] > found["h200"]["precisions"][name]["step_s"]
    assert any("H100" in note for note in found["h100"]["job"]["notes"])


def test_a_gpu_of_a_record_is_known_by_what_cuda_calls_it():
    assert (key_of("NVIDIA H200"), key_of("NVIDIA H100 80GB HBM3")) == ("h200", "h100")
    for other in ("NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA B200"):
        with pytest.raises(ValueError, match=f"no prediction for the GPU {other}"):
            key_of(other)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise --gpu``: another GPU's memory, and what of a prediction goes by its bytes."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.tools.advise.gpus import BY_BYTES, GPUS, key_of
from jetrl_verl.tools.advise.job import Job
from jetrl_verl.tools.advise.memory import GIB
from jetrl_verl.tools.advise.predict import precisions, predict
from jetrl_verl.tools.advise.rates import FILE, measured
from jetrl_verl.tools.advise.report import warnings
from jetrl_verl.tools.advise.shapes import KNOWN, model_of

EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])


def advise(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["advise", *words])
    return result.exit_code, result.output


def test_on_an_h100_what_goes_by_bytes_of_memory_takes_longer_and_nothing_else():
    ours, theirs = measured(), measured().on("h100")
    times = theirs["bandwidth"] / ours["bandwidth"]
    assert 0.65 < times < 0.75, "3.35 and 4.8 TB/s, by their maker"
    names = json.loads(FILE.read_text())["rates"]
    changed = {name for name in names if theirs[name] != ours[name]}
    assert changed == set(BY_BYTES)
    assert all(theirs[name] / ours[name] == pytest.approx(times) for name in changed)
    assert ours.on("h200")["cache"] == ours["cache"] and theirs.on("h100")["cache"] == theirs["cache"]
    assert {names[name]["unit"] for name in BY_BYTES} == {"B/s"}
    others = {name for name, entry in names.items() if entry["unit"] == "B/s"} - set(BY_BYTES)
    assert others == {GPUS["h100"].bandwidth}, "whose rate goes by bytes, too?"


def test_an_h100_has_less_memory_for_the_cache_and_the_trainer():
    job = Job(EIGHT, 64, 4, 256.0, 2048.0, 512, 4096, gpus=8, tp=1)
    (precision,) = [each for each in precisions(job, True) if each.name == "jet_fp8"]
    large, small = (predict(measured(), replace(job, gpu=gpu), precision) for gpu in ("h200", "h100"))
    assert large.rollout.cache - small.rollout.cache == pytest.approx(0.5 * (139.8 - 79.1) * GIB)
    assert small.trainer == large.trainer and small.step > 1.05 * large.step
    again = predict(measured().on("h100"), replace(job, gpu="h100"), precision)
    assert again.step == small.step, "rates that are the GPU's already stay"
    one = replace(job, gpus=1, eight_bit=True)
    said = {gpu: " ".join(warnings(replace(one, gpu=gpu), [predict(measured(), replace(one, gpu=gpu), precision)]))
            for gpu in GPUS}  # fmt: skip
    assert "of a GPU's 79 under" in said["h100"] and "of a GPU's" not in said["h200"]


def test_the_command_says_which_gpu_and_what_is_assumed_of_it():
    sizes = ("--model", "qwen3-8b", "--gpus", "4", "--response-length", "2048")
    code, text = advise(*sizes, "--gpu", "h100")
    assert code == 0 and "4 x NVIDIA H100 80GB, rollout TP 1" in text
    assert "Assumed: an NVIDIA H100 80GB takes an NVIDIA H200's time, and for bytes of its memory" in text
    code, text = advise(*sizes)
    assert code == 0 and "4 x NVIDIA H200, rollout TP 1" in text and "H100" not in text
    code, text = advise(*sizes, "--gpu", "b200")
    assert code == 1 and "no prediction for the GPU b200; choose --gpu h200 or h100" in text


def test_a_gpu_is_known_by_what_cuda_calls_it():
    assert (key_of("NVIDIA H200"), key_of("NVIDIA H100 80GB HBM3")) == ("h200", "h100")
    with pytest.raises(KeyError):
        key_of("NVIDIA H100 NVL")

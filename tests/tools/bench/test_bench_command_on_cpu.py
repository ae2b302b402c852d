# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of `jetrl bench`, its tables from made-up records, and what the programs beside it refuse."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.tools.bench import gemm, linear, machine, quant, reason_of
from jetrl_verl.tools.bench.report import geometric_mean, ratios, times_table
from jetrl_verl.tools.provenance import provenance

ROOT = Path(__file__).parents[3]


def invoke(monkeypatch, *words):
    """(exit status, options, repeats, output) of a command whose work is left out."""
    seen = []
    for module, name in ((gemm, "run_gemm"), (quant, "run_quant"), (linear, "run_linear")):
        monkeypatch.setattr(module, name, lambda options, console, repeats: seen.extend([options, repeats]) or 1)
    monkeypatch.setattr(machine, "this_machine", lambda repeats: repeats)
    result = CliRunner().invoke(app, ["bench", *words])
    return (result.exit_code, *seen, result.output)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("gemm", gemm.GemmOptions()),
        ("quant", quant.QuantOptions()),
        ("linear", linear.LinearOptions()),
    ],
)
def test_without_words_the_defaults_are_the_options_own(monkeypatch, command, options):
    status, seen, repeats, _ = invoke(monkeypatch, command)
    assert status == 1 and repeats == (20 if command == "linear" else 30)
    for name, value in vars(options).items():
        got = getattr(seen, name)
        assert (tuple(got) if isinstance(value, tuple) else got) == value, name


def test_words_narrow_what_is_timed_and_full_widens_it(monkeypatch):
    words = "gemm --models qwen3-8b,qwen2.5-7b --what fprop --tokens 8192 --contenders native,bf16 --sustained 20"
    _, seen, _, _ = invoke(monkeypatch, *words.split(), "--out", "a.json", "--repeats", "7")
    assert (seen.models, seen.what, seen.tokens) == (["qwen3-8b", "qwen2.5-7b"], ["fprop"], [8192])
    assert (seen.contenders, seen.sustained, str(seen.out)) == (["native", "bf16"], 20, "a.json")
    _, seen, _, _ = invoke(monkeypatch, "gemm", "--full", "--contenders", "native")
    assert len(seen.models) == 4 and len(seen.batches) == 10 and seen.contenders == ["native"]


@pytest.mark.parametrize("command", ["gemm", "quant", "linear"])
def test_a_machine_without_a_gpu_is_refused_in_one_sentence(monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", command])
    assert result.exit_code == 2
    assert "error: jetrl bench needs an NVIDIA GPU and torch finds none; run it on" in result.output


def test_other_builds_are_named_with_their_libraries(monkeypatch):
    _, seen, _, _ = invoke(monkeypatch, "gemm", "--beside", "before=a/libbefore.so", "--beside", "after=b.so")
    assert seen.beside == {"before": Path("a/libbefore.so"), "after": Path("b.so")}


@pytest.mark.parametrize(
    "entry", ["libbefore.so", "before=", "=libbefore.so", "native=a.so", "jetrl_native=a.so", "a=b"]
)
def test_a_build_without_a_library_or_a_name_of_its_own_is_refused(entry):
    result = CliRunner().invoke(app, ["bench", "gemm", "--beside", "a=a.so", "--beside", entry])
    assert result.exit_code == 2 and f"not '{entry}'" in " ".join(result.output.split())


def test_a_word_that_is_no_number_is_refused():
    result = CliRunner().invoke(app, ["bench", "gemm", "--tokens", "many"])
    assert result.exit_code == 2 and "is not a list of numbers" in result.output


def record(layer, m, floor, **us):
    spreads = {name: {"median": value, "low": value, "high": value} for name, value in us.items()}
    shape = {"model": "tiny", "layer": layer, "m": m, "n": 256, "k": 512}
    return shape | {"floor_us": floor, "bound": "operations", "us": spreads}


def test_a_ratio_is_the_other_over_ours_with_its_worst_and_best_shape():
    records = [record("o", 8, 1.0, native=2.0, triton=4.0), record("down", 64, 1.0, native=2.0, triton=1.0, bf16=6.0)]
    assert ratios(records, "native") == {
        "triton": {"mean": pytest.approx(1.0), "shapes": 2}
        | {"worst": 0.5, "at": "down 64 x 256 x 512", "best": 2.0, "best_at": "o 8 x 256 x 512"},
        "bf16": {"mean": pytest.approx(3.0), "shapes": 1}
        | {"worst": 3.0, "at": "down 64 x 256 x 512", "best": 3.0, "best_at": "down 64 x 256 x 512"},
    }
    assert ratios(records, "cublaslt") == {}
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and math.isnan(geometric_mean([]))


def written(file: Path, records: list[dict], **other) -> Path:
    records = [{"what": "fprop", "out": "bf16", "refused": {}} | record for record in records]
    file.write_text(json.dumps({"device": "NVIDIA H200", "records": records, "absent": {}, "wrong": []} | other))
    return file


def test_several_files_are_one_table_with_mean_worst_and_best(tmp_path):
    one = written(tmp_path / "one.json", [record("o", 8, 1.0, native=2.0, triton=4.0)])
    refused = record("down", 64, 1.0, native=2.0, triton=1.0) | {"refused": {"torchao": "raises"}}
    two = written(tmp_path / "two.json", [refused], absent={"cublaslt": "not a Hopper GPU"})
    result = CliRunner().invoke(app, ["bench", "report", str(one), str(two)])
    rows = [line.split() for line in result.output.splitlines()]
    ends = ["0.500", *["down", "64", "x", "256", "x", "512"], "2.000", *["o", "8", "x", "256", "x", "512"]]
    assert result.exit_code == 0 and ["fprop", "native", "triton", "2", "1.000", *ends] in rows
    assert "never timed: torchao" in result.output and "absent in two.json: cublaslt" in result.output
    assert "Build: no commit recorded." in result.output


def test_files_of_two_builds_share_a_table_only_if_asked_and_named(tmp_path):
    old = written(tmp_path / "old.json", [record("o", 8, 1.0, native=2.0, triton=4.0)])
    new = written(tmp_path / "new.json", [record("o", 16, 1.0, native=2.0, triton=4.0)], build=provenance())
    result = CliRunner().invoke(app, ["bench", "report", str(old), str(new)])
    assert result.exit_code == 2 and "2 builds" in result.output and "--across-builds" in result.output
    result = CliRunner().invoke(app, ["bench", "report", str(old), str(new), "--across-builds"])
    assert result.exit_code == 0 and "no commit recorded: old.json" in result.output


@pytest.mark.parametrize(
    "other,said",
    [
        ({"device": "NVIDIA H100"}, "several devices"),
        ({"records": [{"what": "fprop"}]}, "is no result of"),
        ({"records": [record("o", 8, 1.0, native=2.0) | {"what": "fprop", "out": "bf16"}]}, "Name one of the two"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, other, said):
    one = written(tmp_path / "one.json", [record("o", 8, 1.0, native=2.0)])
    two = written(tmp_path / "two.json", [record("o", 16, 1.0, native=2.0)])
    two.write_text(json.dumps(json.loads(two.read_text()) | other))
    result = CliRunner().invoke(app, ["bench", "report", str(one), str(two)])
    assert result.exit_code == 2 and said in result.output


@pytest.mark.parametrize("name", ["full_fprop_dgrad", "full_wgrad", "full_decode"])
def test_records_from_before_builds_were_recorded_stay_readable(name):
    file = ROOT / f"benchmarks/results/{name}_h200.json"
    result = CliRunner().invoke(app, ["bench", "report", str(file)])
    assert result.exit_code == 0 and "no commit recorded" in result.output


def test_a_cell_is_microseconds_and_percent_of_the_floor():
    console = Console(width=120, record=True)
    console.print(times_table("FProp", [record("o", 8, 1.5, native=2.0), record("down", 64, 3.0, triton=6.0)]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["o", "8", "256", "512", "1.5", "2.0", "75%", "-"] in lines
    assert ["down", "64", "256", "512", "3.0", "-", "6.0", "50%"] in lines


def test_a_shape_that_nothing_computes_still_has_its_row():
    console = Console(width=120, record=True)
    console.print(times_table("FProp", [record("o", 8, 1.5), record("down", 64, 3.0, triton=6.0)]))
    assert ["o", "8", "256", "512", "1.5", "-"] in [line.split() for line in console.export_text().splitlines()]


def on_gpu(folder: Path, *words: str) -> tuple[int, str]:
    """Exit status and stderr of benchmarks/on_gpu.sh started in ``folder``, where no part could do any work."""
    guard = folder / "bin"
    guard.mkdir()
    (guard / "timeout").write_text("#!/bin/sh\nexit 9\n")
    (guard / "timeout").chmod(0o755)
    ended = subprocess.run(
        ["bash", str(ROOT / "benchmarks/on_gpu.sh"), *words],
        cwd=folder,
        env={**os.environ, "PATH": f"{guard}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stderr


def test_the_gpu_run_wants_a_folder(tmp_path):
    assert on_gpu(tmp_path) == (2, "usage: benchmarks/on_gpu.sh OUT [part ...]\n")


def test_the_gpu_run_ends_where_its_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    status, said = on_gpu(tmp_path, "file/out", "no_part")
    assert status == 2 and "file" in said and "no_part" not in said


def test_the_gpu_run_takes_a_folder_below_the_callers_own_and_no_unknown_part(tmp_path):
    status, said = on_gpu(tmp_path, "out", "no_part")
    assert status == 2 and said.startswith("no_part is not a part; choose from: operations ")
    assert (tmp_path / "out").is_dir() and not (ROOT / "out").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [(("--help",), 0, "usage: weight_steps.py [-h] folder"), ((), 2, "arguments are required: folder")],
)
def test_weight_steps_says_what_it_takes(words, status, said):
    program = [sys.executable, str(ROOT / "benchmarks/weight_steps.py"), *words]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == status and said in ended.stdout + ended.stderr


def test_weight_steps_names_a_folder_without_weights(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks/weight_steps.py"), str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == f"error: no *.safetensors in {tmp_path}; name a Hugging Face folder\n"


def test_an_error_is_told_in_one_line():
    assert reason_of(RuntimeError("first\nsecond")) == "raises RuntimeError: first"
    assert reason_of(AssertionError()) == "raises AssertionError: "

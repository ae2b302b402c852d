# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`jetrl bench linear` on the CPU: what a step computes, how often weights are quantized, what fails the command."""

import json

import pytest
import torch
from bench_fakes import fake_machine
from rich.console import Console
from torch import nn

from jetrl_verl.nn.linear import JetLinear
from jetrl_verl.tools.bench import BenchError, linear, shapes
from jetrl_verl.tools.bench.linear import CONTENDERS, LinearOptions, distances, run_linear, step

OURS = ("bf16", "jet_fp8", "jet_fp8_bf16_backward")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    for module in (shapes, linear):
        monkeypatch.setattr(module, "MODELS", {"tiny": {"o": (256, 256), "down": (128, 384)}})

    def run(contenders=OURS, **added):
        monkeypatch.setattr(linear, "CONTENDERS", CONTENDERS | added)
        out, console = tmp_path / "linear.json", Console(width=160, record=True)
        options = LinearOptions("tiny", (256,), [*contenders, *added], out)
        status = run_linear(options, console, fake_machine())
        return status, json.loads(out.read_text()), console.export_text()

    return run


def test_our_layers_are_near_bf16_and_the_table_sums_the_layers(bench):
    status, found, text = bench()
    assert status == 0 and [record["layer"] for record in found["records"]] == ["o", "down"]
    for record in found["records"]:
        assert set(record["us"]) == set(OURS)
        assert record["error"]["bf16"] == {"y": 0.0, "dx": 0.0, "dw": 0.0}
        assert all(0 < value < 0.07 for value in record["error"]["jet_fp8"].values())
        # its forward is the same, its gradients are not rounded
        straight = record["error"]["jet_fp8_bf16_backward"]
        assert straight["y"] == pytest.approx(record["error"]["jet_fp8"]["y"]) and straight["dx"] == straight["dw"] == 0
    assert found["summary"]["bf16"]["mean"] == pytest.approx(1.0)
    assert "sum" in text and "largest distance from BF16, jet_fp8: y 0.0" in text


def test_a_step_quantizes_its_weight_once():
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    forward = CONTENDERS["jet_fp8"](layer)
    x = torch.randn(128, 256).bfloat16().requires_grad_()
    dy = torch.randn(128, 128).bfloat16()
    for expected in (1, 2, 3):
        y, dx, dw = step(forward, x, layer.weight, dy)
        assert isinstance(layer, JetLinear) and layer.quantizations == expected
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, layer.weight.shape)
    assert x.grad is None and layer.weight.grad is None


def test_an_inaccurate_layer_fails_the_command(bench):
    def without_scales(layer):
        return lambda x: (x * layer.weight.new_tensor(1.5)) @ layer.weight.t()

    status, found, text = bench(coarse=without_scales)
    assert status == 1 and found["wrong"] == ["coarse: o at 256 rows", "coarse: down at 256 rows"]
    assert "WRONG coarse: o at 256 rows" in text


def test_nan_is_not_near_anything(bench):
    status, found, _ = bench(broken=lambda layer: lambda x: layer(x) * float("nan"))
    assert status == 1 and found["wrong"][0] == "broken: o at 256 rows"


def test_what_another_package_raises_is_named_and_the_rest_goes_on(bench):
    def raises(layer):
        raise ImportError("torchao needs another torch")

    status, found, text = bench(torchao_new=raises)
    assert status == 0 and set(found["records"][0]["us"]) == set(OURS)
    assert "left out of 2: torchao_new: raises ImportError: torchao needs another torch" in text


def test_a_machine_without_torchao_says_so(bench, monkeypatch):
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    status, found, text = bench(("bf16", "jet_fp8", "torchao_blockwise", "torchao_rowwise"))
    assert status == 0 and set(found["absent"]) == {"torchao_blockwise", "torchao_rowwise"}
    assert "absent: torchao_rowwise: torchao is not installed" in text


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_recipes_keep_the_parameter_that_gradients_are_asked_for(recipe, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    model = CONTENDERS[f"torchao_{recipe}"](layer)
    assert type(model[0]).__name__ == "Float8Linear" and model[0].weight is layer.weight


def test_distances_are_relative_norms():
    want = [torch.full((2, 2), 2.0)] * 3
    assert distances([torch.full((2, 2), 3.0), *want[1:]], want) == {"y": 0.5, "dx": 0.0, "dw": 0.0}


def test_what_is_not_known_is_refused(bench):
    with pytest.raises(BenchError, match="no contender 'te'; choose from bf16, jet_fp8"):
        bench(("te",))


@pytest.mark.parametrize("tokens", [(), (0,), (256, -1)])
def test_rows_are_counts(tokens):
    with pytest.raises(BenchError, match="give numbers from 1 on"):
        run_linear(LinearOptions(tokens=tokens, contenders=("bf16",)), Console(), fake_machine())


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(linear, "measure", None)
    with pytest.raises(BenchError, match=f"^--out {tmp_path} cannot be written .*; name a file.$"):
        run_linear(LinearOptions(out=tmp_path), Console(), fake_machine())


def test_where_no_contender_is_left_nothing_is_timed(bench, monkeypatch):
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"no contender can run here \(torchao_rowwise: torchao is not installed\)"):
        bench(("torchao_rowwise",))


def test_where_every_layer_is_refused_nothing_was_timed(bench):
    def raises(layer):
        raise ImportError("torchao needs another torch")

    with pytest.raises(BenchError, match="nothing was timed, for the reasons above"):
        bench((), torchao_new=raises)

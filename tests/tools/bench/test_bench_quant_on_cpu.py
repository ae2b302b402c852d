# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`jetrl bench quant` on the CPU: every operation against its reference, bytes, shares, and what a wrong byte does."""

import json

import pytest
import torch
from bench_fakes import fake_machine
from rich.console import Console

from jetrl_verl import kernels
from jetrl_verl.reference import QuantizedTensor
from jetrl_verl.tools.bench import BenchError, quant, shapes
from jetrl_verl.tools.bench.quant import QuantOptions, cases, equal_bytes, leaves, run_quant

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    for module in (shapes, quant):
        monkeypatch.setattr(module, "MODELS", {"tiny": {"o": (256, 256), "down": (256, 384)}})
    monkeypatch.setattr(quant, "CHECKED_ROWS", 130)

    def run(**options):
        out, console = tmp_path / "quant.json", Console(width=160, record=True)
        status = run_quant(QuantOptions("tiny", (192,), out=out, **options), console, fake_machine())
        return status, json.loads(out.read_text()), console.export_text()

    return run


def test_every_operation_equals_its_reference_and_is_set_against_a_copy(bench):
    status, found, text = bench(rules=("fp32", "pow2"))
    assert status == 0 and found["wrong"] == []
    groups = (quant.quantizers, quant.norms, quant.activations, quant.weights)
    named = {name for group in groups for name in group(128, 256, "fp32", CPU)}
    assert {record["operation"] for record in found["records"]} == named | {"copy"}
    for record in found["records"]:
        assert record["us"]["median"] == 1.0  # one tick
        assert record["gb_per_s"] == pytest.approx(record["bytes"] / 1000, rel=1e-3)
        assert record["share_of_copy"] == pytest.approx(record["bytes"] / (4 * record["m"] * record["k"]), rel=1e-3)
    assert "192 x 256, rule pow2" in text and "% of copy" in text and "silu_mul_quantize, both layouts" in text


def test_every_operation_but_the_sequences_has_a_reference():
    for group in (quant.quantizers, quant.norms, quant.activations, quant.weights):
        for name, operation in group(128, 256, "fp32", CPU).items():
            assert (operation.reference is None) == (" + " in name), name


def test_bytes_are_those_of_the_operands_and_results():
    m, k = 256, 512
    for group in (quant.quantizers, quant.norms, quant.activations, quant.weights):
        for name, operation in group(m, k, "fp32", CPU).items():
            if " + " in name:
                continue
            operands = operation.operands()
            tensors = [*leaves(tuple(x for x in operands if not isinstance(x, str))), *leaves(operation.run(*operands))]
            moved = sum(tensor.nbytes for tensor in tensors)
            # the norm's weight is read too, and blocks' scales are not counted: both are next to nothing
            assert moved == pytest.approx(operation.bytes * m * k, rel=2e-3), name


def test_one_wrong_byte_fails_the_command(bench, monkeypatch):
    real = kernels.quantize_1x128

    def off(x, rule):
        q = real(x, rule)
        q.qdata.view(torch.uint8)[-1, -1] ^= 1
        return q

    monkeypatch.setattr(kernels, "quantize_1x128", off)
    status, found, text = bench()
    assert status == 1
    assert "quantize_1x128 of 192 x 256, rule fp32: not its reference's bytes" in found["wrong"]
    assert "WRONG quantize_1x128 of 192 x 256" in text


def test_bytes_are_compared_with_nan_and_type():
    nan = torch.tensor([float("nan"), 1.0])
    assert equal_bytes((nan, None), [nan.clone()])
    assert not equal_bytes((nan,), (nan.double(),)) and not equal_bytes((nan,), (nan, nan))
    qdata = QuantizedTensor(torch.zeros(2), torch.ones(1))
    assert [len(leaves(value)) for value in (qdata, (None, qdata, [qdata]))] == [2, 4]


def test_shapes_are_the_models_sizes():
    found = [(m, k) for m, k, _ in cases(QuantOptions(tokens=(8192,)))]
    assert found == [(8192, 4096), (8192, 12288), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


def test_what_is_not_known_is_refused(bench):
    with pytest.raises(BenchError, match="no scale rule 'mx'; choose from fp32, pow2"):
        bench(rules=("mx",))
    with pytest.raises(BenchError, match="no model 'gpt'"):
        list(cases(QuantOptions("gpt")))


@pytest.mark.parametrize("tokens", [(), (0,), (192, -1)])
def test_rows_are_counts(tokens):
    with pytest.raises(BenchError, match="give numbers from 1 on"):
        run_quant(QuantOptions(tokens=tokens), Console(), fake_machine())


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(quant, "measure", None)
    with pytest.raises(BenchError, match=f"^--out {tmp_path} cannot be written .*; name a file.$"):
        run_quant(QuantOptions(out=tmp_path), Console(), fake_machine())

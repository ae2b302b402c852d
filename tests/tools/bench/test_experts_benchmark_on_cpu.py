# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/experts_on_gpu.py on a CPU: every product of it at a small shape, and vLLM's kernel called with the
arguments that it declares; the variants of experts_variants_on_gpu.py, and what runs behind the experts
(behind_experts_on_gpu.py), which a CPU computes alike."""

import argparse
import importlib
import importlib.util
import inspect
import json
from pathlib import Path

import pytest
import torch
from bench_fakes import fake_machine

from benchmarks import behind_experts_on_gpu, experts_on_gpu, experts_variants_on_gpu, vllm_experts
from jetrl_verl import kernels, reference

SHAPE = experts_on_gpu.Shape(experts=8, per_token=2, hidden=256, inner=128)
SOURCE = vllm_experts.source_folder(None)


def options(tmp_path: Path, source: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path / "experts.json", decode=[1, 9], training=[40], vllm_source=source, timeline=False
    )


def test_it_measures_what_is_there_and_says_what_is_not(tmp_path, monkeypatch, capsys):
    stock = importlib.import_module

    def import_module(name: str, package: str | None = None):
        if name.startswith("vllm"):
            raise ImportError(f"no module {name}")
        return stock(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert experts_on_gpu.run(fake_machine(), SHAPE, options(tmp_path, tmp_path)) == 0
    result = json.loads((tmp_path / "experts.json").read_text())
    assert [record["tokens"] for record in result["decode"]] == [1, 9]
    for record in result["decode"]:
        assert set(record["us"]) == {"jet_fp8"} and record["to_best"] is None
        assert 0 < record["error"]["jet_fp8"] < 0.1
        bytes_of_expert = 3 * 256 * 128 * (1 + 4 / 128**2)
        assert record["floor_us"] == pytest.approx(1e6 * record["hit"] * bytes_of_expert / 4e12)
        assert 2 <= record["hit"] <= 8
    (record,) = result["training"]
    assert set(record["us"]) == {"jet_fp8", "bf16 grouped_mm"} and not record["refused"]
    assert set(record["error"]) == {"output", "dx", "dweights", "dgate_up", "ddown"} and not record["wrong"]
    assert "whole block" in result["absent"][0] and "products" in result["absent"][1]
    assert "absent: vLLM's whole block" in capsys.readouterr().out


def test_a_result_that_is_wrong_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experts_on_gpu, "missing_operators", lambda: "not asked")
    monkeypatch.setattr(experts_on_gpu, "MOST_DISTANCE", 1e-6)
    assert experts_on_gpu.run(fake_machine(), SHAPE, options(tmp_path, tmp_path)) == 1
    assert "WRONG at 9 tokens: jet_fp8" in capsys.readouterr().out


@pytest.mark.skipif(SOURCE is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", ["vllm_bf16", "vllm_fp8"])
def test_vllms_kernel_is_cut_out_of_its_file_and_called_as_it_is_declared(name, monkeypatch):
    products = vllm_experts.Products(SOURCE, 128, 768)
    kernel, calls = products.kernel, []
    declared = inspect.signature(kernel.fn)

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, num_warps, num_stages, **constants):
                calls.append((grid, declared.bind(*arguments, **constants).arguments))

            return launch

    monkeypatch.setattr(products, "kernel", Recorder())
    layer = experts_on_gpu.draw_layer(SHAPE, torch.device("cpu"))
    x = experts_on_gpu.tokens_of(SHAPE, 40, torch.device("cpu"))
    chosen = torch.rand(40, 8).argsort(dim=1)[:, :2].to(torch.int32)
    products.calls(layer, x, chosen, torch.rand(40, 2))[name]()
    (grid, first), (_, second) = calls
    assert first["use_fp8_w8a8"] == second["use_fp8_w8a8"] == (name == "vllm_fp8")
    assert (first["N"], first["K"], first["top_k"], first["MUL_ROUTED_WEIGHT"]) == (256, 256, 2, False)
    assert (second["N"], second["K"], second["top_k"], second["MUL_ROUTED_WEIGHT"]) == (256, 128, 1, True)
    assert first["num_valid_tokens"] == second["num_valid_tokens"] == 80
    # Every pair once, each in a block of its expert.
    rows, pairs = first["BLOCK_SIZE_M"], first["sorted_token_ids_ptr"]
    assert sorted(pairs[pairs < 80].tolist()) == list(range(80)) and int(pairs.max()) == 80
    of_row = first["expert_ids_ptr"].repeat_interleave(rows)
    assert torch.equal(of_row[: len(pairs)][pairs < 80], chosen.flatten()[pairs[pairs < 80].long()])
    assert int(first["num_tokens_post_padded_ptr"]) == int(reference.segments(chosen, 8, rows).start[-1])
    assert grid[0] == -(-len(pairs) // rows) * -(-256 // first["BLOCK_SIZE_N"])


def test_no_source_of_vllm_is_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert vllm_experts.source_folder(None) is None


def variants_of(tmp_path: Path, monkeypatch) -> tuple[int, list[dict]]:
    """Exit status and records at two and at forty tokens."""
    monkeypatch.setattr(experts_variants_on_gpu, "launches_alone", lambda count: None)
    asked = argparse.Namespace(out=tmp_path / "variants.json", tokens=[2, 40], only="")
    status = experts_variants_on_gpu.run(fake_machine(), SHAPE, asked)
    return status, json.loads(asked.out.read_text())["variants"]


def test_every_variant_is_measured_beside_the_block_as_it_is(tmp_path, monkeypatch, capsys):
    status, (few, many) = variants_of(tmp_path, monkeypatch)
    assert status == 0 and not few["other_bits"] and not many["other_bits"]
    for record in (few, many):
        names = {experts_variants_on_gpu.AS_IT_IS, *experts_variants_on_gpu.variants(record["tokens"])}
        assert set(record["us"]) == names and len(names) > 25
    assert (few["launches"], many["launches"]) == (6, 7)
    assert "no product starts early" in capsys.readouterr().out


def test_a_variant_has_its_constants_while_it_runs_and_other_bits_are_told(tmp_path, monkeypatch, capsys):
    stock, before = kernels.combine, experts_variants_on_gpu.COMBINE._MANY

    def combine(y, row):
        wrong = experts_variants_on_gpu.COMBINE._MANY == (512, 1)
        return stock(y, row) + wrong

    monkeypatch.setattr(kernels, "combine", combine)
    status, (few, _) = variants_of(tmp_path, monkeypatch)
    assert status == 1 and few["other_bits"] == ["sum: 512 columns, 1 warps"]
    assert before == experts_variants_on_gpu.COMBINE._MANY
    assert "OTHER BITS at 40 tokens: sum: 512 columns, 1 warps" in capsys.readouterr().out


@pytest.mark.parametrize("number", range(4))
def test_neighbours_begin_with_other_draws(number):
    calls = [0, 1, 2]
    turns = [experts_variants_on_gpu.taking_turns(calls, n) for n in (number, number + 1)]
    assert all(sorted(turn) == calls for turn in turns) and all(a != b for a, b in zip(*turns, strict=True))


def behind_experts(tmp_path: Path) -> tuple[int, list[dict]]:
    asked = argparse.Namespace(out=tmp_path / "behind.json", tokens=[1, 9], timeline=False)
    status = behind_experts_on_gpu.run(fake_machine(), SHAPE, asked)
    return status, json.loads(asked.out.read_text())["records"]


def test_what_runs_behind_the_experts_is_measured_apart_and_together(tmp_path, capsys):
    status, records = behind_experts(tmp_path)
    assert status == 0 and [record["tokens"] for record in records] == [1, 9]
    for record in records:
        assert set(record["us"]) == {"apart", "together", "product"} and record["wrong"] == 0
        assert record["gain_us"] == pytest.approx(record["us"]["apart"]["median"] - record["us"]["together"]["median"])
    assert "equal" in capsys.readouterr().out


def test_a_launch_with_other_bits_is_told(tmp_path, monkeypatch, capsys):
    stock = kernels.combine
    monkeypatch.setattr(kernels, "combine", lambda y, row: stock(y, row.flip(1)) * 2)
    status, (record, _) = behind_experts(tmp_path)
    assert status == 1 and record["wrong"] == record["draws"] > 0
    assert f"{record['wrong']} of {record['draws']} differ" in capsys.readouterr().out

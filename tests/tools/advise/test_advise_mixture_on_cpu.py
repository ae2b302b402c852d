# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise`` of a mixture of experts: bytes of all experts in memory, of those that a batch reaches in decoding,
operations of a token's own, and the sentence that says what has never been timed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.tools.advise.memory import trainer_memory
from jetrl_verl.tools.advise.rates import measured
from jetrl_verl.tools.advise.rollout import Engine, decode_step
from jetrl_verl.tools.advise.shapes import KNOWN, model_of
from jetrl_verl.tools.advise.sync import spans, stacks, sync_parts
from jetrl_verl.tools.advise.trainer import JET, STOCK, forward

ROOT = Path(__file__).parents[3]
EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])
MIXTURE = model_of("qwen3-30b-a3b", KNOWN["qwen3-30b-a3b"])


def run(*words: str):
    result = CliRunner().invoke(app, ["advise", *words])
    return result.exit_code, result.output


def test_a_mixture_has_all_parameters_in_memory_and_few_in_a_product():
    """By hand: a layer has 128 experts of 3 x 2048 x 768, attention of 2048 x (4096 + 512 + 512 + 4096), a router."""
    expert, attention, router = 3 * 2048 * 768, 2048 * (2 * 4096 + 2 * 512), 128 * 2048
    assert MIXTURE.in_layers == 48 * (128 * expert + attention + router)
    assert MIXTURE.active == 48 * (8 * expert + attention + router)
    assert MIXTURE.quantized == MIXTURE.in_layers - 48 * router
    assert MIXTURE.active_quantized == MIXTURE.active - 48 * router
    assert MIXTURE.parameters / 1e9 == pytest.approx(30.53, abs=0.005)
    assert (MIXTURE.active + MIXTURE.head) / 1e9 == pytest.approx(3.04, abs=0.005)


def test_experts_that_a_batch_reaches():
    experts = MIXTURE.experts
    assert experts.hit(1) == pytest.approx(8)
    assert experts.hit(2) == pytest.approx(8 + 8 * 120 / 128)
    assert experts.hit(64) == pytest.approx(126, abs=0.1), "nearly all of 128"


@pytest.mark.parametrize("requests", [1, 64])
def test_a_decode_step_reads_the_weights_of_the_experts_that_it_reaches(requests):
    """Bytes over bandwidth: at 64 requests 7.2 ms in FP8, 14 in BF16 at 4.24 TB/s, head and router in BF16."""
    rates = measured()
    steps = {kind: decode_step(rates, MIXTURE, Engine(kind), requests, 64 * requests) for kind in ("fp8", "bf16")}
    others = 2 * (MIXTURE.head + 48 * 128 * 2048)
    for kind, step in steps.items():
        size = {"fp8": 1, "bf16": 2}[kind]
        weights = 48 * (MIXTURE.experts.hit(requests) * 3 * 2048 * 768 + 2048 * (2 * 4096 + 2 * 512))
        assert step.weights == pytest.approx((size * weights + others) / rates["bandwidth"])
    assert steps["bf16"].weights > 1.6 * steps["fp8"].weights


def test_a_mixtures_products_are_those_of_the_active_parameters():
    rates, tokens = measured(), 4096
    found = forward(rates, MIXTURE, STOCK, tokens, 100)
    expected = 2 * tokens * (MIXTURE.active + MIXTURE.head) / rates["gemm.bf16.fprop"]
    assert found.gemm == pytest.approx(expected)
    fp8 = forward(rates, MIXTURE, JET, tokens, 100).gemm
    assert 0.5 * found.gemm < fp8 < 0.7 * found.gemm


def test_a_mixtures_memory_has_whole_layers_and_the_rows_of_its_experts():
    few, many = (trainer_memory(MIXTURE, 8, tokens) for tokens in (8192, 32768))
    layer = MIXTURE.in_layers / 48
    assert few.gathered == many.gathered == 2 * (2 * layer + MIXTURE.head) + 8 * layer
    per_row = 2048 * 4 + 768 * 13
    assert many.rows == (32768 * 8 + 127 * 128) * per_row
    assert trainer_memory(EIGHT, 8, 8192).rows == 0
    assert few.weights == 4 * MIXTURE.parameters / 8
    assert many.peak - many.state - many.gradients == pytest.approx(many.checkpoints + many.logits + many.gathered)


def test_a_mixtures_sync_has_few_tensors_in_fp8_and_those_of_each_expert_in_verl():
    assert MIXTURE.tensors_of_verl == 48 * (4 + 3 * 128 + 4 + 1) + 3
    # A layer is a span: q, k and v; o; the router; its vectors; two tensors of experts. Embedding, last norm and head.
    assert spans(MIXTURE) == 48 and stacks(MIXTURE) == 48 * (2 + 1 + 1 + 2) + 3
    assert stacks(MIXTURE, quantized=True) == 48 * 4 and stacks(MIXTURE, quantized=False) == 48 * 2 + 3
    ours, stock = (sync_parts(measured(), MIXTURE, *kind, 8) for kind in (("fp8", True), ("bf16", False)))
    assert ours["launches"] < 0.1 * stock["launches"] and ours["gathers"] < 0.01 * stock["gathers"]
    own = ("launches", "moved", "probes", "gathers")
    assert sum(ours[part] for part in own) < 0.1 * sum(stock[part] for part in own)
    # What further GPUs add goes by their bytes, which are half.
    assert 0.5 < ours["gpus"] / stock["gpus"] < 0.55 and ours["verl"] == stock["verl"]


def test_a_sync_follows_bytes_and_stacks():
    half = model_of("half", KNOWN["qwen3-8b"] | {"num_hidden_layers": 18})
    whole, short = (sync_parts(measured(), model, "fp8", True, 1) for model in (EIGHT, half))
    assert short["moved"] < whole["moved"] and short["verl"] == whole["verl"]
    # Half of the spans, of 2 widths and the vectors each, and half of the layers.
    per_stack = measured()["sync.launches_of_a_stack"] * measured()["sync.ours.launch"]
    fewer = 9 * 3 * per_stack + 18 * 4 * measured()["sync.ours.launch"]
    assert whole["launches"] - short["launches"] == pytest.approx(fewer)
    assert sync_parts(measured(), EIGHT, "bf16", True, 1)["moved"] > whole["moved"]


def test_a_mixtures_report_says_what_is_not_recorded_and_has_the_precisions_that_it_supports():
    script = ROOT / "recipes/qwen3_moe/run_qwen3_30b_a3b_base.sh"
    status, output = run("--script", str(script), "--json")
    found = json.loads(output)
    assert status == 0 and list(found["precisions"]) == ["bf16", "fp8_rollout", "jet_fp8"]
    assert "a mixture of experts is predicted from rates of dense layers" in found["warnings"][0]
    assert not found["settings"]
    assert found["precisions"]["jet_fp8"]["gain_over_bf16"] > 1
    status, output = run("--script", str(script), "--json", "jetrl.operations=stock")
    assert list(json.loads(output)["precisions"]) == ["bf16", "fp8_rollout"]
    status, output = run("--script", str(script), "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert "refused: " in output and "[2048, 192]" in output

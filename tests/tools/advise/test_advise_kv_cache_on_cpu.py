# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise`` and the FP8 KV cache: bytes, seconds from measured attention, memory, and what refuses it."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.reference.kv_cache import cache_shape
from jetrl_verl.tools.advise.job import Means, job_of_options
from jetrl_verl.tools.advise.memory import rollout_memory
from jetrl_verl.tools.advise.predict import precisions, predict, with_each_cache
from jetrl_verl.tools.advise.rates import measured
from jetrl_verl.tools.advise.rollout import Engine, decode_step
from jetrl_verl.tools.advise.shapes import KNOWN, model_of

EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])
BF16, FP8 = Engine("fp8", shared=True), Engine("fp8", shared=True, kv_cache="fp8")
LONG = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.adv_estimator=grpo",
    "data.max_response_length=8192",
)


def run(*words: str):
    result = CliRunner().invoke(app, ["advise", "--model", "qwen3-8b", *words])
    return result.exit_code, result.output


def advised(*words: str) -> dict:
    status, said = run("--json", "--", *LONG, *words)
    assert status == 0, said
    return json.loads(said)


def test_a_token_takes_the_bytes_of_the_cache_that_the_rollout_allocates():
    pages, heads, units, unit = cache_shape(7, 64, 8)
    assert EIGHT.kv_bytes("fp8") == 36 * heads * units * unit // 64 == 36 * 8 * 2 * 129
    assert EIGHT.kv_bytes() == 36 * 8 * 2 * 256


def test_a_cache_of_as_many_bytes_holds_twice_the_tokens_less_the_scales():
    sizes = {"gpu_bytes": 1e11, "most": 64, "batched_tokens": 8192}
    held = [rollout_memory(EIGHT, "fp8", 0.5, kv_cache=cache, **sizes) for cache in ("bf16", "fp8")]
    assert held[0].cache == held[1].cache and held[1].tokens / held[0].tokens == pytest.approx(256 / 129)


@pytest.mark.parametrize("requests", [32, 64])
def test_attention_of_a_step_gains_what_it_was_measured_to_gain(requests):
    """By bytes 0.56 to 0.58 of BF16's time in the records, of which each call's constant is no part here."""
    rates, tokens = measured(), {64: 4096, 32: 16384}[requests] * requests
    steps = [decode_step(rates, EIGHT, engine, requests, tokens) for engine in (BF16, FP8)]
    assert 0.5 < steps[1].cache / steps[0].cache < 0.58
    assert replace(steps[1], cache=0) == replace(steps[0], cache=0)


def test_one_long_request_waits_for_its_keys_with_either_cache():
    rates = measured()
    waits = [decode_step(rates, EIGHT, engine, 1, 32768).cache for engine in (BF16, FP8)]
    by_bytes = 32768 * EIGHT.kv_bytes("fp8") / rates["cache.fp8"]
    assert min(waits) > 2 * by_bytes
    stock = Engine("fp8", kv_cache="fp8")
    assert decode_step(rates, EIGHT, stock, 1, 32768).cache == waits[1]


def test_a_baseline_of_another_format_has_the_cache_and_stock_verl_does_not():
    job = replace(job_of_options("qwen3-8b", 8, 512, 8192, 64, 8, Means(256, 4096)), kv_cache="fp8")
    held = {column.name: column.engine.kv_cache for column in precisions(job, True)}
    assert {name for name, cache in held.items() if cache == "bf16"} == {"bf16", "bf16, Liger"}
    assert set(held) > {"jet_fp8", "fp8_rollout", "int8_rollout", "bf16_shared"}


def test_either_cache_is_the_step_of_a_job_that_asks_for_it():
    asked = job_of_options("qwen3-8b", 8, 512, 8192, 64, 8, Means(256, 4096))
    (jet,) = (column for column in precisions(asked, True) if column.name == "jet_fp8")
    caches = with_each_cache(measured(), asked, jet)
    assert caches["bf16"] == predict(measured(), asked, jet)
    (other,) = (column for column in precisions(replace(asked, kv_cache="fp8"), True) if column.name == "jet_fp8")
    assert caches["fp8"] == predict(measured(), asked, other)
    assert caches["fp8"].step < caches["bf16"].step
    assert {**caches["fp8"].phases, "generation": 0} == {**caches["bf16"].phases, "generation": 0}


def test_a_cache_that_is_short_preempts_less():
    asked = replace(job_of_options("qwen3-8b", 1, 512, 8192, 64, 8, Means(256, 4096)), utilization=0.25)
    (jet,) = (column for column in precisions(asked, True) if column.name == "jet_fp8")
    caches = with_each_cache(measured(), asked, jet)
    assert caches["bf16"].schedule.preemptions > caches["fp8"].schedule.preemptions


def test_a_cache_that_does_not_exist_is_one_sentence():
    status, said = run("--", *LONG, "jetrl.kv_cache=fp4")
    assert status != 0 and "jetrl.kv_cache=fp4 is not supported with any precision. Set jetrl.kv_cache to one" in said


def test_the_report_says_what_the_cache_is_worth_and_costs():
    plain, chosen = advised(), advised("jetrl.kv_cache=fp8")
    assert plain["job"]["kv_cache"] == "bf16" and chosen["job"]["kv_cache"] == "fp8"
    assert plain["jet_fp8_by_kv_cache"] == chosen["jet_fp8_by_kv_cache"]
    for found, held in ((plain, "bf16"), (chosen, "fp8")):
        assert found["precisions"]["jet_fp8"]["step_s"] == found["jet_fp8_by_kv_cache"][held]["step_s"]
    assert plain["precisions"]["bf16"] == chosen["precisions"]["bf16"]
    status, said = run("--", *LONG, "jetrl.kv_cache=fp8")
    assert status == 0 and "jetrl.kv_cache=fp8 is chosen. With it jet_fp8 has 74304 bytes a token instead of" in said
    assert "It costs jet_fp8 no exactness" in said and "No setting is refused or costs exactness." in said
    assert "jetrl.kv_cache=fp8 is not chosen" in run("--", *LONG)[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["jetrl.operations=stock"], "jetrl.kv_cache=fp8 is not supported with jetrl.operations=stock"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "jetrl.kv_cache=fp8 is not supported with jetrl.operations=stock"),
        (["--model", "with smaller heads"], "its heads are of 64, and a scale is for 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_an_fp8_cache_is_refused_with_leaves_the_columns_of_stock_verl(words, sentence, tmp_path):
    name = []
    if words[0] == "--model":
        (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen3-1.7b"] | {"head_dim": 64}))
        name, words = ["--model", str(tmp_path)], []
    status, said = run(*name, "--", *LONG, *words, "jetrl.kv_cache=fp8")
    assert status == 0 and "refused: " in said and sentence in " ".join(said.split()), said
    assert "fp8_rollout" not in said.split("memory of one GPU")[0].split("what takes most")[0]
    assert "With it jet_fp8 has" not in said

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl advise``: jobs from options, overrides and scripts; the schedule; memory; which settings cost what."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support_models import MODELS
from typer.testing import CliRunner

from jetrl_verl.cli import app
from jetrl_verl.config.check import reader
from jetrl_verl.config.support.row import DRIVER, WORKER, shown
from jetrl_verl.config.support.table import INEXACT_ROWS
from jetrl_verl.tools.advise import AdviseError
from jetrl_verl.tools.advise.gpus import GPUS
from jetrl_verl.tools.advise.job import Job, Means, compose, job_of_config, job_of_options, words_of_script
from jetrl_verl.tools.advise.memory import GIB, held_bytes, rollout_memory, rollout_weights, trainer_memory
from jetrl_verl.tools.advise.predict import STOCK_VERL, Precision, batches, precisions, predict
from jetrl_verl.tools.advise.rates import measured
from jetrl_verl.tools.advise.report import larger_micro_batches, warnings
from jetrl_verl.tools.advise.rollout import Engine, decode_step, generate, response_lengths
from jetrl_verl.tools.advise.settings import BITS, REFUSED, STOCK, findings, model_findings, settings_of, unseen
from jetrl_verl.tools.advise.shapes import KNOWN, known_name, model_of
from jetrl_verl.tools.advise.trainer import BF16_SHARED, JET, JET_STOCK, Batch, host, update
from jetrl_verl.tools.advise.trainer import STOCK as STOCK_FLOW

ROOT = Path(__file__).parents[3]
EIGHT = model_of("qwen3-8b", KNOWN["qwen3-8b"])
BF16, FP8 = Engine("bf16"), Engine("fp8", shared=True)
SMALL = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "algorithm.adv_estimator=grpo",
)


@pytest.fixture(scope="module")
def small():
    return compose(SMALL, "jet_fp8")


def run(*words: str):
    result = CliRunner().invoke(app, ["advise", *words])
    return result.exit_code, result.output


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-0.6b", 0.6), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.8),
     ("qwen3-32b", 32.8), ("qwen2.5-1.5b", 1.54), ("qwen2.5-7b", 7.6), ("qwen2.5-32b", 32.8), ("llama-3.1-8b", 8.03),
     ("deepseek-r1-distill-qwen-1.5b", 1.78)],
)  # fmt: skip
def test_known_shapes_have_the_published_number_of_parameters(model, billions):
    assert model_of(model, KNOWN[model]).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_hub_name_is_that_of_its_shape():
    assert known_name("Qwen/Qwen3-8B-Base") == known_name("/models/qwen3-8b") == "qwen3-8b"
    assert known_name("Qwen/Qwen3-8B-GGUF") is None


def test_the_head_of_a_tied_model_is_read_but_not_kept_twice():
    tied, apart = (model_of("m", KNOWN["qwen3-4b"] | {"tie_word_embeddings": tied}) for tied in (True, False))
    assert apart.parameters - tied.parameters == tied.head == apart.head


def test_a_folder_is_read_with_the_defaults_of_its_class(tmp_path):
    config = {key: value for key, value in KNOWN["qwen3-4b"].items() if key not in ("head_dim", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    status, output = run("--model", str(tmp_path), "--gpus", "8", "--json")
    assert status == 0, output
    sizes = json.loads(output)["precisions"]["bf16"]["memory_bytes"]
    assert sizes["rollout_weights"] == rollout_weights(model_of("m", KNOWN["qwen3-4b"]), "bf16")


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [100, 2000, 4000, 6000, 8000])
def test_lengths_have_the_mean_that_was_asked_for_and_none_is_too_long(mean):
    lengths = response_lengths(4096, mean, 8192)
    assert lengths.mean() == pytest.approx(mean, rel=0.01) and lengths.max() <= 8192 and lengths.min() >= 1


def test_equal_lengths_with_memory_to_spare_take_the_sum_of_their_steps():
    rates = measured()
    found = generate(rates, EIGHT, FP8, [512] * 64, 100)
    steps = sum(decode_step(rates, EIGHT, FP8, 64, 64 * (100 + i + 0.5)).total for i in range(512))
    assert found.seconds - found.prefill == pytest.approx(steps, rel=1e-6)
    assert found.preemptions == 0 and found.running == 64 and found.preempted == 0


def test_every_second_is_accounted_for():
    lengths = response_lengths(300, 500, 1500)
    found = generate(measured(), EIGHT, BF16, lengths, 64, cache_tokens=20_000, most=100)
    assert found.seconds == pytest.approx(sum(found.spent.values()) + found.prefill + found.preempted)
    assert found.preemptions > 0 and found.preempted > 0 and found.running <= 100


def test_a_larger_cache_is_never_slower_and_a_cut_off_tail_is_shorter():
    rates, lengths = measured(), response_lengths(256, 1000, 4000)
    seconds = [generate(rates, EIGHT, FP8, lengths, 64, cache_tokens=c).seconds for c in (3e4, 1e5, 3e5, math.inf)]
    assert seconds == sorted(seconds, reverse=True)
    alike = generate(rates, EIGHT, FP8, np.full(256, 1000.0), 64)
    tailed = generate(rates, EIGHT, FP8, lengths, 64)
    assert alike.tail == 0 < tailed.tail and alike.seconds < tailed.seconds


def test_a_finer_clock_changes_little(monkeypatch):
    lengths = response_lengths(400, 1000, 4000)
    coarse = generate(measured(), EIGHT, BF16, lengths, 64, most=128).seconds
    monkeypatch.setattr("jetrl_verl.tools.advise.rollout.CHUNKS", 1000)
    assert generate(measured(), EIGHT, BF16, lengths, 64, most=128).seconds == pytest.approx(coarse, rel=0.02)


def test_fewer_requests_than_may_run_wait_for_a_place():
    few = generate(measured(), EIGHT, BF16, [100] * 32, 10, most=8)
    assert few.running == 8 and few.seconds > generate(measured(), EIGHT, BF16, [100] * 32, 10).seconds


# --- the whole step --------------------------------------------------------------------------------------------------


def test_gpus_of_a_replica_add_behind_o_and_down_of_each_layer_and_behind_the_embedding():
    rates, engines = measured(), {tp: replace(FP8, tp=tp) for tp in (1, 2, 4, 8)}
    steps = {tp: decode_step(rates, EIGHT, engine, 64, 64 * 1000) for tp, engine in engines.items()}
    assert steps[1].reductions == 0.0 < steps[2].reductions < steps[4].reductions < steps[8].reductions
    in_order = {tp: steps[tp].reductions / (2 * EIGHT.layers + 1) - rates["reduce.4.ordered"] for tp in (4, 8)}
    assert in_order[8] == pytest.approx(7 / 3 * in_order[4]), "each rank reads the products of seven others, not three"
    once = rates["reduce.4.ordered"] + rates["reduce.4.ordered.byte"] * 64 * 2 * EIGHT.hidden
    assert steps[4].reductions == pytest.approx((2 * EIGHT.layers + 1) * once)
    assert steps[4].total - steps[4].reductions < 0.6 * steps[1].total
    # Of two ranks vLLM's own has the trainer's order; of four, where operations are not shared, it need not.
    stock = {
        tp: decode_step(rates, EIGHT, replace(engine, shared=False), 512, 512).reductions
        for tp, engine in engines.items()
    }
    ordered = {tp: decode_step(rates, EIGHT, engine, 512, 512).reductions for tp, engine in engines.items()}
    assert stock[2] == ordered[2] and stock[4] < ordered[4]
    found = generate(rates, EIGHT, engines[4], [64] * 8, 100)
    assert found.spent["reductions"] > 0 and sum(found.spent.values()) + found.prefill == pytest.approx(found.seconds)
    alone = generate(rates, EIGHT, engines[1], [64] * 8, 100)
    assert found.prefill < alone.prefill and alone.spent["reductions"] == 0.0


def job(**changes):
    made = job_of_options("qwen3-8b", 8, 512, 2048, 64, 8, Means(256, 1024))
    return replace(made, **changes)


def column(name: str, asked, shared: bool = True) -> Precision:
    return next(each for each in precisions(asked, shared) if each.name == name)


def test_weights_gathered_once_take_memory_and_save_what_each_micro_batch_spends_on_them():
    asked = job(micro_tokens=4096, log_prob_tokens=4096, mini_batches=2, reference=True)
    once = replace(asked, gathers_once=True)
    scored, trained, *_ = batches(asked)
    assert trained.micro > 4
    for name, bytes_held in (("jet_fp8", 2 * EIGHT.parameters + 2 * EIGHT.quantized), ("fp8_rollout", None)):
        before, after = (predict(measured(), each, column(name, each)) for each in (asked, once))
        spent = before.phases["update"].parts["gathered"], after.phases["update"].parts["gathered"]
        assert spent[1] == pytest.approx(spent[0] * 2 / (2 * trained.micro)), "once an optimizer step"
        for phase in ("old log-probabilities", "reference"):
            scoring = [each.phases[phase].parts["gathered"] for each in (before, after)]
            assert scoring[1] == pytest.approx(scoring[0] / scored.micro), phase
        assert after.trainer.gathered == (bytes_held or 2 * EIGHT.parameters) > before.trainer.gathered
    assert held_bytes(EIGHT, replace(JET, backward="bf16")) == 2 * EIGHT.parameters + EIGHT.quantized
    for name in STOCK_VERL:
        assert predict(measured(), once, column(name, once)) == predict(measured(), asked, column(name, asked))


def test_where_micro_batches_are_small_the_host_decides():
    rates, small = measured(), replace(job_of_options("qwen3-1.7b", 1, 512, 2048, 64, 8, Means(256, 1024)), prompts=8)
    small = replace(small, micro_tokens=2560, log_prob_tokens=2560)
    scored, trained, *_ = batches(small)
    of_host = {}
    for once in (False, True):
        each = replace(small, gathers_once=once)
        found, kind = predict(rates, each, column("jet_fp8", each)), "host.fp8.kept" if once else "host.fp8"
        assert rates[f"{kind}.log_probs"] < 0.4 * rates[f"{kind}.update"]
        old, update_ = (found.phases[phase].parts for phase in ("old log-probabilities", "update"))
        assert old["host"] > 0 and update_["host"] > 0 and "host" in found.phases["update"].limit
        assert sum(old.values()) - old["verl"] == pytest.approx(scored.micro * 28 * rates[f"{kind}.log_probs"])
        around = update_["verl"] + update_["optimizer"]
        assert sum(update_.values()) - around == pytest.approx(trained.micro * 28 * rates[f"{kind}.update"])
        of_host[once] = found.waits
        assert found.waits == pytest.approx(old["host"] + update_["host"])
        (said,) = warnings(each, [found])
        assert said.startswith("micro-batches of 2560 tokens: in a step the GPU waits for its host")
        assert f"{found.waits:.1f} s under jet_fp8" in said and "tokens fit" in said
    assert of_host[True] < of_host[False]
    large = replace(small, micro_tokens=32768, log_prob_tokens=32768)
    found = predict(rates, large, column("jet_fp8", large))
    assert found.waits == 0.0 and not warnings(large, [found])
    # A job that has no more than one micro-batch for a GPU cannot have larger ones.
    few = replace(small, prompts=2, samples=1, response=100.0)
    (said,) = warnings(few, [predict(rates, few, column("jet_fp8", few))])
    assert said.endswith("; a step has no more.") and "gathered" not in said


def test_a_forward_that_does_not_run_again_is_work_the_host_does_not_have():
    rates, again = (
        measured(),
        replace(job_of_options("qwen3-1.7b", 1, 512, 2048, 8, 8, Means(256, 1024)), micro_tokens=2560),
    )
    once = replace(again, checkpointing=False)
    seconds = [predict(rates, each, column("jet_fp8", each)).phases["update"] for each in (again, once)]
    _, trained, *_ = batches(again)
    assert all(each.parts["host"] > 0 for each in seconds)
    assert seconds[0].seconds - seconds[1].seconds == pytest.approx(trained.micro * 28 * rates["host.fp8.log_probs"])


def test_what_runs_decides_what_the_host_does():
    """Shared operations make fewer launches than stock ones, and fewer gathers are less work under each precision."""
    rates, micro = measured(), 10
    found = {
        (flow, kept): host(rates, EIGHT, flow, micro, kept, updates=True)
        for flow in (STOCK_FLOW, BF16_SHARED, JET)
        for kept in (False, True)
    }
    assert all(found[flow, True] < found[flow, False] for flow in (STOCK_FLOW, BF16_SHARED, JET))
    assert found[BF16_SHARED, False] < found[JET, False] < found[STOCK_FLOW, False]
    assert found[STOCK_FLOW, False] == pytest.approx(micro * EIGHT.layers * rates["host.stock.update"])


def test_a_weight_sync_goes_by_the_gpus_of_one_host():
    rates = measured()
    asked = {gpus: job_of_options("qwen3-8b", gpus, 512, 2048, 512, 8, Means(256, 1024)) for gpus in (1, 4, 8, 64)}
    syncs = {gpus: predict(rates, each, column("bf16", each)).phases["weight sync"] for gpus, each in asked.items()}
    assert syncs[1].parts["gpus"] == 0.0 < syncs[4].parts["gpus"] < syncs[8].parts["gpus"]
    assert syncs[64].parts == syncs[8].parts, "eight hosts sync side by side"
    over_tp = replace(asked[8], tp=8)
    assert predict(rates, over_tp, column("bf16", over_tp)).phases["weight sync"].parts == syncs[8].parts
    small_hosts = replace(asked[8], gpus_of_host=4)
    assert predict(rates, small_hosts, column("bf16", small_hosts)).phases["weight sync"].parts == syncs[4].parts


def test_what_stays_gathered_is_counted_where_memory_is_looked_at():
    """A 14B model over four GPUs, which with its weights gathered has no room for the micro-batches it else has."""
    small = job_of_options("qwen3-14b", 4, 512, 2048, 64, 8, Means(256, 1024))
    small = replace(small, micro_tokens=2048, log_prob_tokens=2048)
    once = replace(small, gathers_once=True)

    def tokens(asked: Job) -> int:
        return int(larger_micro_batches(asked).rpartition("=")[2].rstrip("."))

    assert tokens(once) < tokens(small)

    def said(asked: Job) -> str:
        return " ".join(warnings(asked, [predict(measured(), asked, each) for each in precisions(asked, True)]))

    assert f"jetrl.gathered=batch under FSDP2, for {held_bytes(small.model, JET) / GIB:.1f} GiB" in said(small)
    assert "jetrl.gathered=batch" not in said(once), "it is set already"
    large = job_of_options("qwen3-32b", 16, 512, 2048, 64, 16, Means(256, 1024))
    large = replace(large, micro_tokens=2048, log_prob_tokens=2048)
    assert "jetrl.gathered" not in said(large), "119 GiB more do not fit"
    assert "jetrl.gathered=pass, or 8-bit moments" in said(replace(large, gathers_once=True))


def test_phases_add_up_and_parts_to_their_phase():
    asked = job(reference=True)
    for precision in precisions(asked, True):
        found = predict(measured(), asked, precision)
        assert found.step == sum(phase.seconds for phase in found.phases.values())
        for name, phase in found.phases.items():
            assert sum(phase.parts.values()) == pytest.approx(phase.seconds, abs=0.03), name


def test_verls_own_work_goes_by_the_sequences_of_a_gpu_and_in_an_update_by_its_epochs():
    rates, of_jobs = measured(), []
    for samples, epochs in ((8, 1), (24, 3)):
        asked = job(prompts=64, samples=samples, epochs=epochs, reference=True)
        phases = predict(rates, asked, column("jet_fp8", asked)).phases
        of_jobs.append({phase: phases[phase].parts["verl"] for phase in phases if phase != "generation"})
        for phase, name, times in (
            ("old log-probabilities", "verl.old_log_prob", 1),
            ("reference", "verl.old_log_prob", 1),
            ("update", "verl.update", epochs),
        ):
            sequences = 64 * samples / asked.gpus * times
            assert of_jobs[-1][phase] == pytest.approx(rates[name] + sequences * rates[f"{name}.sequence"]), phase
    few, many = of_jobs
    assert few["weight sync"] == many["weight sync"] and few["rest"] == many["rest"]


def test_what_verls_own_work_has_no_record_of_is_said(small):
    for batch, drawn_out in ((256, False), (257, True)):
        asked = job_of_options("qwen3-8b", 8, 512, 2048, batch, 8, Means(256, 1024))
        assert any("drawn out from 256 sequences a GPU to 257" in note for note in asked.notes) is drawn_out
    many = ["data.train_batch_size=4096", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]
    plain, asked = (
        " ".join(job_of_config(reader(each), Means()).notes) for each in (small, compose([*SMALL, *many], "jet_fp8"))
    )
    for words in ("drawn out from 256 sequences a GPU", "Ulysses over 2 GPUs"):
        assert words in asked and words not in plain


def test_the_trainer_of_jet_fp8_is_stock_where_its_operations_are():
    assert column("jet_fp8", job()).trainer == JET
    slower, faster = (predict(measured(), job(), column("jet_fp8", job(), shared)) for shared in (False, True))
    assert slower.phases["update"].seconds > faster.phases["update"].seconds
    assert column("jet_fp8", job(liger=True), False).trainer.operations == "liger"
    assert [each.name for each in precisions(job(liger=True), True)].count("bf16, Liger") == 0


def test_shared_operations_under_bf16_linears_are_a_column_where_the_job_allows_them():
    assert [each.name for each in precisions(job(), False)].count("bf16_shared") == 0
    stock, ours, jet = (predict(measured(), job(), column(n, job())) for n in ("bf16", "bf16_shared", "jet_fp8"))
    parts = [found.phases["update"].parts for found in (stock, ours, jet)]
    assert parts[1]["gemm"] == parts[0]["gemm"] > parts[2]["gemm"]
    assert parts[1]["attention"] == parts[2]["attention"] < parts[0]["attention"]
    assert parts[0]["between"] > parts[2]["between"] > parts[1]["between"], "no quantizer in front of o"
    assert stock.step > ours.step > jet.step


def test_packed_attention_without_flash_attention_runs_the_shared_kernels(small):
    words = [*SMALL, "++actor_rollout_ref.model.override_config.attn_implementation=jetrl_varlen"]
    asked, plain = (job_of_config(reader(config), Means()) for config in (compose(words, "jet_fp8"), small))
    assert asked.varlen and not plain.varlen and any("flash-attn" in note for note in plain.notes)
    assert not any("flash-attn" in note for note in asked.notes)
    faster, slower = (predict(measured(), each, column("bf16", each)).phases["update"] for each in (asked, plain))
    assert faster.parts["attention"] < slower.parts["attention"]
    assert {**faster.parts, "attention": 0} == {**slower.parts, "attention": 0}
    alike = [predict(measured(), each, column("jet_fp8", each)).step for each in (asked, plain)]
    assert alike[0] == alike[1], "jet_fp8 has its own attention either way"


def test_slices_of_a_rollout_over_several_gpus_are_named(small):
    words = [word for word in SMALL if "tensor_model_parallel_size" not in word]
    split = compose([*words, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "jet_fp8")
    assert any("2 slices of K" in note for note in job_of_config(reader(split), Means()).notes)


def test_options_of_the_node_jetrl_are_in_the_columns(small):
    words = [*SMALL, "jetrl.operations=stock", "jetrl.backward=bf16", "jetrl.ref=fp8"]
    asked = job_of_config(reader(compose(words, "jet_fp8")), Means())
    jet = column("jet_fp8", asked)
    assert jet.trainer == jet.reference == replace(JET_STOCK, backward="bf16") and not jet.engine.shared
    plain = job_of_config(reader(small), Means())
    assert (
        column("jet_fp8", plain).trainer == JET and column("jet_fp8", plain).reference == column("bf16", plain).trainer
    )
    slower, faster = (update(measured(), EIGHT, flow, Batch(1e5, 4096, 8)) for flow in (jet.trainer, JET_STOCK))
    assert slower.gemm > faster.gemm and slower.between == faster.between


def test_padding_costs_tokens_and_checkpointing_a_forward():
    packed, padded = (batches(job(packed=packed))[1].tokens for packed in (True, False))
    assert padded == 64 * 8 * (512 + 2048) / 8 and packed == pytest.approx(64 * 8 * (256 + 1024) / 8, rel=0.01)
    with_, without = (
        predict(measured(), job(checkpointing=c), column("bf16", job())).phases["update"].seconds for c in (True, False)
    )
    assert with_ > without


def test_a_cache_that_holds_no_sequence_has_no_seconds():
    long = job(utilization=0.118)
    found = predict(measured(), long, column("bf16", long))
    assert math.isinf(found.step)


def test_mini_batches_bound_micro_batches():
    _, trained, _, most = batches(job(mini_batches=64))
    assert trained.micro >= 64 and most < 8192


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_counted():
    found = trainer_memory(EIGHT, 8, 16384)
    assert found.weights + found.gradients + found.moments == pytest.approx(16 * EIGHT.parameters / 8)
    assert found.logits == 8 * 151936 * 16384 and found.peak > found.state
    # 2 bytes a logit, 4 GiB that forward kept, 1 GiB of a chunk; a short micro-batch is one chunk, and kept whole.
    shared = partial(trainer_memory, EIGHT, 8, shared=True)
    assert shared(16384).logits == 2 * 151936 * 16384 + 5 * 2**30
    assert shared(1024).logits == (2 + 4 + 4) * 151936 * 1024
    assert trainer_memory(EIGHT, 8, 16384, eight_bit=True).moments == pytest.approx(0.255 * found.moments)
    assert trainer_memory(EIGHT, 8, 16384, checkpointing=False).checkpoints > 10 * found.checkpoints
    rollout = partial(rollout_memory, EIGHT, gpu_bytes=GPUS["h200"].memory, most=256, batched_tokens=8192)
    ours, stock = (rollout(kind, 0.5) for kind in ("fp8", "bf16"))
    assert ours.weights == stock.weights - EIGHT.quantized and ours.tokens > stock.tokens
    assert rollout("bf16", 0.05).cache == 0


# --- settings --------------------------------------------------------------------------------------------------------


SHOWN = [row for row in INEXACT_ROWS if row.keys]
OF_THE_MODEL = [row for row in INEXACT_ROWS if row.name in MODELS]


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.name)
def test_a_setting_that_costs_exactness_is_named_with_its_remedy(row, small):
    base, wrong = reader(small), {row.keys[0]: row.example, **row.beside}
    found = settings_of(lambda key: wrong[key] if key in wrong else base(key))
    (one,) = [each for each in found if row.keys[0] in each.message and "is not supported with" in each.message]
    stock = row.scope.stock or row.keys == ("jetrl.operations",)
    assert one.effect == (STOCK if stock else BITS)
    words = {"key": row.keys[0], "value": shown(row.example)}
    asked = {"jetrl.precision": "jet_fp8_exact", "jetrl.operations": "shared"}
    assert one.message == row.message(asked.get, **words) and " Set " in one.message and one.message.endswith(".")


@pytest.mark.parametrize("row", OF_THE_MODEL, ids=lambda row: row.name)
def test_what_a_model_has_that_costs_exactness_is_named_with_its_remedy(row):
    model = model_of("m", KNOWN["qwen3-8b"] | MODELS[row.name])
    (one,) = model_findings(model, 1)
    assert one.effect == STOCK and one.message.endswith(f". {row.remedy}.")


def test_every_row_that_costs_exactness_is_named():
    """What only a worker sees is a class that vLLM or transformers chose: no job shows it."""
    elsewhere = [row for row in INEXACT_ROWS if row not in SHOWN and row not in OF_THE_MODEL]
    (overridden,) = [row for row in elsewhere if row.name == "overridden_model"]
    machine = [row for row in elsewhere if row.found == DRIVER and row is not overridden]
    assert machine and all(row.feature in unseen() for row in machine)
    assert {row.found for row in elsewhere if row not in machine and row is not overridden} == {WORKER}
    code, text = run("--model", "qwen3-8b")
    assert code == 0 and unseen() in text.splitlines()


def test_all_that_a_model_has_is_named_and_not_the_first_alone():
    both = KNOWN["qwen3-8b"] | MODELS["soft_cap"] | MODELS["logit_scale"]
    assert [each.effect for each in model_findings(model_of("m", both), 1)] == [STOCK, STOCK]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("+actor_rollout_ref.model.override_config.rope_theta=5", "override_config overrides rope_theta"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta=5", "hf_overrides overrides rope"),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0", None),
    ],
)
def test_what_is_overridden_in_the_model_is_named_unless_the_operations_are_chosen(word, found):
    def named(*more: str) -> list[str]:
        return [each.message for each in findings(compose([*SMALL, word, *more], "jet_fp8"), EIGHT, 1)]

    assert [found in message for message in named()] == ([True] if found else [])
    assert all("Set jetrl.operations=shared if" in message for message in named())
    assert named("jetrl.operations=shared") == []


def test_a_plain_job_costs_nothing_and_a_refused_one_says_so(small):
    assert findings(small, EIGHT, 1) == []
    refused = compose([*SMALL, "actor_rollout_ref.model.lora_rank=8"], "jet_fp8")
    assert [each.effect for each in findings(refused, EIGHT, 1)] == [REFUSED]


def test_a_model_that_does_not_fit_is_named():
    unfit = model_findings(model_of("qwen2.5-7b", KNOWN["qwen2.5-7b"]), 8)
    assert [each.effect for each in unfit] == [REFUSED] and "28 heads over 4 key heads" in unfit[0].message
    assert "tensor_model_parallel_size=4, the largest that fits" in unfit[0].message
    sliding = KNOWN["qwen3-8b"] | {"sliding_window": 4096}
    assert [each.effect for each in model_findings(model_of("m", sliding), 1)] == [STOCK]


# --- jobs and the command --------------------------------------------------------------------------------------------


def test_a_job_of_verls_configuration_has_its_numbers(small):
    found = job_of_config(reader(small), Means())
    assert (found.prompts, found.samples, found.gpus, found.mini_batches) == (1024, 1, 8, 4)
    assert (found.longest_prompt, found.longest_response, found.response) == (512, 512, 256)
    assert found.micro_tokens == 16384 and found.micro_sequences is None and found.packed and not found.reference
    assert any("--mean-response" in note for note in found.notes)


def test_the_scripts_of_recipes_give_their_overrides():
    words = words_of_script(ROOT / "recipes/gsm8k/run_qwen3_8b.sh", ["data.train_batch_size=512"])
    assert "actor_rollout_ref.rollout.n=5" in words and words[-1] == "data.train_batch_size=512"
    assert not any("verl.trainer" in word for word in words)


def test_a_script_that_starts_python_by_name_is_recorded_too(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("set -e\npython3 -c 'import verl'\npython3 -m verl.trainer.main_ppo a.b=1 'c=x y' \"$@\"\n")
    assert words_of_script(script, ["d=2"]) == ["a.b=1", "c=x y", "d=2"]


def test_a_script_reports_as_the_overrides_that_it_passes():
    status, output = run("--script", str(ROOT / "recipes/gsm8k/run_qwen3_8b.sh"), "--json")
    assert status == 0, output
    found = json.loads(output)
    assert found["job"]["model"] == "Qwen/Qwen3-8B" and found["job"]["samples"] == 5 and found["job"]["reference"]
    assert found["settings"] == [] and found["precisions"]["jet_fp8"]["gain_over_bf16"] > 1
    ours = {"bf16_shared", "fp8_rollout", "jet_fp8", "int8_rollout"}
    assert set(found["precisions"]) == {"bf16", "bf16, Liger", *ours}


def test_overrides_that_switch_shared_operations_off_are_in_the_report():
    status, output = run("--", *SMALL, "actor_rollout_ref.model.use_liger=True", "precision=bf16")
    assert status == 0, output
    assert "stock operations: actor_rollout_ref.model.use_liger=true" in output and "a step, seconds" in output


def test_refused_settings_leave_no_column_of_ours():
    status, output = run("--json", "--", *SMALL, "actor_rollout_ref.model.lora_rank=8")
    assert status == 0 and set(json.loads(output)["precisions"]) == {"bf16", "bf16, Liger"}


def test_sizes_alone_need_neither_overrides_nor_a_folder():
    status, output = run(
        "--model",
        "qwen3-1.7b",
        "--gpus",
        "1",
        "--prompt-length",
        "256",
        "--response-length",
        "256",
        "--batch",
        "4",
        "--n",
        "4",
    )
    assert status == 0 and "gain over bf16" in output
    assert "micro-batches of 4096 tokens: in a step the GPU waits" in output and "; a step has no more." in output


def test_small_micro_batches_come_with_the_largest_that_memory_holds():
    """Under stock operations, whose logits are the larger ones: 0.9 of the GPU holds it, and 2048 tokens more it does
    not, or a step has no more."""
    small = Job(EIGHT, 64, 4, 256.0, 512.0, 512, 1024, gpus=1, eight_bit=True, micro_tokens=2048)

    def peak(tokens: int) -> float:
        return trainer_memory(EIGHT, 1, tokens, eight_bit=True).peak / small.gpu_bytes

    said = larger_micro_batches(small)
    tokens = int(said.rpartition("ppo_max_token_len_per_gpu=")[2].rstrip("."))
    assert f"{tokens} tokens fit" in said and peak(tokens) <= 0.9 < peak(tokens + 2048)
    few = replace(small, prompts=4, samples=1)
    assert "4096 tokens fit" in larger_micro_batches(few), "a step of 4 x 768 has no more"
    assert larger_micro_batches(replace(small, eight_bit=False)) == "make them larger.", "16 bytes a parameter are all"
    sequences = larger_micro_batches(replace(few, micro_tokens=None, micro_sequences=1, packed=False))
    assert sequences.endswith("4 sequences fit, actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "nothing was asked"),
        (("--model", "/nowhere"), "neither a folder with a config.json nor a known model"),
        (("--model", "qwen3-8b", "--tp", "3"), "hold no whole number of replicas"),
        (("--model", "qwen3-8b", "--batch", "0"), "the batch is 0"),
        (("--model", "qwen3-8b", "--mean-response", "9000"), "is not between 1 and the longest"),
        (("--script", "nowhere.sh"), "is no file"),
        (("--", "data.nothing=1"), "verl does not accept these overrides"),
        (("--", "a=1", "--odd"), "is not understood here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_predicted_is_one_sentence(words, sentence):
    status, output = run(*words)
    assert status == 1 and sentence in output
    assert output.startswith("error: ") and len(output.strip().splitlines()) == 1


def test_a_model_of_another_architecture_is_one_sentence():
    with pytest.raises(AdviseError, match="not supported with jetrl advise: .* Set a model of one of these types"):
        model_of("m", {"model_type": "mixtral"})


def test_a_report_says_of_which_builds_its_rates_are():
    note = measured().builds_note()
    assert "builds side by side" in note and "kv_cache_h200.json" in note
    code, text = run("--model", "qwen3-8b")
    assert code == 0 and f"Rates: {measured().machine}. {note}\n" in text
    code, text = run("--model", "qwen3-8b", "--json")
    assert code == 0 and json.loads(text)["builds"] == note

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` on the CPU: nothing differs under jet_fp8_exact, and a planted difference is named.

Most tests share one run of the command. Other engines run in this process and generate the same tokens."""

import contextlib
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from engine_here import flipped, planted, run_here
from rich.console import Console
from tiny_models import save_policy
from typer.testing import CliRunner

from jetrl_verl.algorithms.old_log_probs import Difference
from jetrl_verl.cli import app
from jetrl_verl.inputs import UserError
from jetrl_verl.tools.diff import rollout, run
from jetrl_verl.tools.diff.attribution import attribute
from jetrl_verl.tools.diff.measures import bits
from jetrl_verl.tools.diff.operations import KINDS, Operation
from jetrl_verl.tools.diff.run import DiffOptions, run_diff
from jetrl_verl.tools.diff.trainer import Trainer

RESPONSE = 12
PADDING = 9
"""Vocabulary entries without a token."""
TEMPERATURE = 0.7
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(900)  # the first test starts two engines in turn


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), "qwen3", PADDING)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": "7+5"}, {"prompt": [{"role": "user", "content": "12+30"}]}, {"prompt_token_ids": [9] * 21}]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def options(policy, prompts, out, *precisions: str) -> DiffOptions:
    return DiffOptions(policy, precisions, prompts, 3, RESPONSE, TEMPERATURE, out)


@pytest.fixture(scope="module")
def exact(policy, prompts, tmp_path_factory, cpu_platform):
    """(status, report, requests, recordings) of one run of the command."""
    requests, recordings = [], []
    engine = run.run_engine

    def recorded(request, *args):
        requests.append(request)
        recordings.append(engine(request, *args))
        return recordings[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_engine", recorded)
        out = tmp_path_factory.mktemp("exact")
        status = run_diff(options(policy, prompts, out, "jet_fp8_exact"), Console(width=120))
    (report,) = json.loads((out / "report.json").read_text())["precisions"]
    return status, report, requests, recordings


@pytest.fixture(scope="module")
def trainer(policy, exact):
    request = exact[2][0]
    return Trainer(policy, rollout.Job.of(request.jetrl), request, TEMPERATURE, CPU)


# --- equal -----------------------------------------------------------------------------------------------------------


def test_exact_differs_nowhere(exact):
    status, report, _, (configured, recorded) = exact
    assert status == 0 and report["equal"] and report["first_difference"] is None
    assert report["tokens"] == 3 * RESPONSE and recorded.responses == configured.responses
    for name in ("trainer_against_rollout", "trainer_against_recorded_rollout", "recorded_against_configured_rollout"):
        assert report[name] == dict(tokens=3 * RESPONSE, differing=0, k3_kl=0.0, p999=0.0, max=0.0)
    # 17 operations in each of two layers, no residual sum at the first, one before them and four after.
    assert len(report["operations"]) == 2 * 17 - 1 + 5
    for row in report["operations"]:
        assert row["elements"] > 0 and row["own"] == row["accumulated"] == dict(share=0.0, ulps=0)
    assert all(side["k3_kl"] == side["max"] == 0 for row in report["kinds"].values() for side in row.values())
    others = ("kv_cache", "convolution", "delta_rule", "router", "choice", "combine")
    assert list(report["kinds"]) == [kind for kind in KINDS if kind not in others]


def test_the_recorded_engine_is_not_the_configured_one(exact):
    _, _, (configured, recorded), _ = exact
    assert configured.responses is None and recorded.responses is not None
    assert configured.arguments["max_num_seqs"] > 3 and configured.arguments["enable_prefix_caching"]
    assert recorded.arguments["max_num_seqs"] == 1 and not recorded.arguments["enable_prefix_caching"]
    assert configured.arguments["logprobs_mode"] == "processed_logprobs"


# --- planted ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def planting():
    """A stack of callbacks that undo the changes."""
    with contextlib.ExitStack() as stack:
        yield stack


def plant_in_operation(planting, trainer, *where):
    planting.enter_context(planted(*where))


def plant_in_module(planting, trainer, path, row, element):
    """Flip a bit in the output of a module."""
    module = trainer._model.get_submodule(path)
    forward = module.forward
    planting.enter_context(mock.patch.object(module, "forward", lambda x: flipped(forward(x), row, element)))


def plant_before_module(planting, trainer, path, row, element):
    """Flip a bit in the input of a module."""
    module = trainer._model.get_submodule(path)
    hook = module.register_forward_pre_hook(lambda _, args: (flipped(args[0], row, element),), prepend=True)
    planting.callback(hook.remove)


# How and where a bit is flipped, and its layer, operation, token and element. Rows of q_norm, rotary and attention are
# [tokens * heads] of 128.
PLANTS = {
    "embedding": (plant_in_module, ("model.embed_tokens", 30, 5), (None, "embedding", 30, 5)),
    "norm": (plant_in_module, ("model.layers.1.post_attention_layernorm", 31, 17), (1, "post_norm", 31, 17)),
    "qk_norm": (plant_in_operation, ("rms_norm", 5, 0, 2 * 29 + 1, 3), (0, "q_norm", 29, 128 + 3)),
    "quantization": (plant_in_module, ("model.layers.1.self_attn.k_proj", 33, 70), (1, "k_proj", 33, 70)),
    "down_proj": (plant_in_module, ("model.layers.0.mlp.down_proj", 4, 11), (0, "down_proj", 4, 11)),
    "rotary": (plant_in_operation, ("rotary", 2, 1, 27, 100), (1, "k_rotary", 27, 100)),
    "attention": (plant_in_operation, ("attention", 2, 1, 2 * 26, 64), (1, "attention", 26, 64)),
    "activation": (plant_before_module, ("model.layers.0.mlp.down_proj", 40, 9), (0, "activation", 40, 9)),
    "lm_head": (plant_in_module, ("lm_head", None, 12), (None, "lm_head", None, 12)),
    "sampler": (plant_in_operation, ("log_probs", 1, 0, 20, 0), (None, "sampler", None, 0)),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bit_is_named(plant, exact, trainer, planting):
    recording = exact[3][1]
    how, arguments, (layer, name, token, element) = PLANTS[plant]
    drawn = 20
    if token is None:
        token = int(recording.drawing[drawn])
    how(planting, trainer, *(token if argument is None else argument for argument in arguments))
    result = attribute(trainer, recording)

    first, operation = result.first, Operation(layer, name)
    assert (first.layer, first.operation, first.kind) == (layer, name, operation.kind)
    assert (first.request, first.position) == recording.place(token)
    assert first.element == element and first.ulps == 1
    row = drawn if operation.kind in ("lm_head", "sampler") else token
    assert first.rollout == recording.outputs[operation][row, element].item() != first.trainer
    assert {o: s.differing for o, s in result.local.items() if s.differing} == {operation: 1}
    before = list(result.accumulated)[: list(result.accumulated).index(operation)]
    assert not any(result.accumulated[o].differing for o in before)
    assert result.without[operation.kind].differing == result.all_corrected.differing == 0
    assert result.alone == {operation.kind: result.mismatch}


def test_two_planted_kinds_are_attributed_separately(exact, trainer, planting):
    """A large difference in one kind and a small one in another: correcting one leaves the other."""
    recording = exact[3][1]
    plant_in_operation(planting, trainer, "log_probs", 1, 0, 20, 0)
    head = trainer._model.lm_head
    logits = head.forward
    planting.enter_context(mock.patch.object(head, "forward", lambda hidden: logits(hidden) * 1.25))
    result = attribute(trainer, recording)
    assert result.first.operation == "lm_head" and list(result.without) == ["lm_head", "sampler"]
    assert result.without["lm_head"] == result.alone["sampler"] and result.without["sampler"] == result.alone["lm_head"]
    assert 0 < result.alone["sampler"].k3_kl < 1e-12 and result.alone["sampler"].differing == 1
    assert result.alone["lm_head"].k3_kl > 1e-4 and result.all_corrected.differing == 0


def test_a_nondeterministic_operation_ends_the_comparison(exact, trainer, planting):
    down, calls = trainer._model.model.layers[0].mlp.down_proj, iter(range(10**6))

    def drift(_, args):
        return (flipped(args[0], 5, next(calls)),)  # another element in every forward

    planting.callback(down.register_forward_pre_hook(drift, prepend=True).remove)
    with pytest.raises(UserError, match="layer 0 activation does not give the same bits twice"):
        attribute(trainer, exact[3][1])


# --- other engines, in this process ----------------------------------------------------------------------------------


def test_rows_of_any_batch_are_assigned_to_their_tokens(exact, monkeypatch):
    """Batched, chunked and preempted: the same bits under the same keys as one sequence at a time."""
    from vllm.v1.core.sched.scheduler import Scheduler

    _, _, (_, request), (_, recorded) = exact
    preempt, preempted = Scheduler._preempt_request, []

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    crowded = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=16, num_gpu_blocks_override=6)
    other = run_here(request, **crowded)
    assert preempted and max(map(len, request.prompts)) > 16
    assert other.responses == recorded.responses and other.outputs.keys() == recorded.outputs.keys()
    for operation, output in recorded.outputs.items():
        assert torch.equal(bits(output), bits(other.outputs[operation])), operation


def test_the_sequence_of_a_stopped_run_is_repeated_and_its_token_named(exact, policy, tmp_path, monkeypatch):
    """The run's rollout reported another bit at a token; a tool's answer has no log-probability at all."""
    recording = exact[3][1]
    stated = recording.log_probs[:RESPONSE].clone()
    stated[3] = (stated[3:4].view(torch.int32) ^ 1).view(torch.float32)
    stated[5] = 0.0
    sampled = [int(token != 5) for token in range(RESPONSE)]
    trained = recording.log_probs[:RESPONSE].tolist()
    values = (recording.prompts[0], recording.responses[0], sampled, stated.tolist(), trained, 3, 1, 99)
    stopped = Difference(*values, step=8, temperature=TEMPERATURE, options={"kv_cache": "bf16"})
    stopped.save(tmp_path / "sequence.json")
    monkeypatch.setattr(run, "run_engine", lambda request, *_: run_here(request))
    console = Console(record=True, width=120)
    words = options(policy, None, tmp_path, "jet_fp8_exact")
    assert run_diff(replace(words, temperature=1.0, sequence=tmp_path / "sequence.json"), console) == 1
    (report,) = json.loads((tmp_path / "report.json").read_text())["precisions"]
    assert report["first_difference"] is None and report["trainer_against_recorded_rollout"]["differing"] == 0
    assert report["recorded_against_configured_rollout"]["differing"] == 1
    assert report["recorded_against_configured_rollout"]["tokens"] == RESPONSE
    output = console.export_text()
    assert "step 8: the log-probability of response token 3 (id " in output
    assert f"here it is {trained[3]:.9g} in the recorded rollout and {trained[3]:.9g} in the trainer" in output


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", dict()), ("qwen2", dict(tie_word_embeddings=True))], ids=["llama", "qwen2"]
)
def test_other_decoders_have_the_same_operations(family, changes, exact, tmp_path):
    """Without QK norms; Qwen2 with biases and tied embeddings."""
    request = replace(exact[2][1], model=str(save_policy(tmp_path, family, PADDING, **changes)))
    recording = run_here(request)
    job = rollout.Job.of(request.jetrl)
    result = attribute(Trainer(tmp_path, job, request, TEMPERATURE, CPU), recording)
    assert result.first is None and result.mismatch.differing == result.all_corrected.differing == 0
    assert len(result.local) == len(result.accumulated) == 2 * 15 - 1 + 5


def test_stock_operations_are_attributed_completely(exact, policy, prompts, tmp_path, monkeypatch):
    """One engine per rollout generates the same tokens; with all kinds corrected the mismatch is exactly zero."""
    request, recordings = exact[2][1], {}

    def repeated(engine_request, *args):
        kind = None if engine_request.jetrl is None else engine_request.jetrl["rollout"]
        if kind not in recordings:
            recordings[kind] = run_here(engine_request, request.responses, max_num_seqs=4)
        return recordings[kind]

    monkeypatch.setattr(run, "run_engine", repeated)
    precisions = ("jet_fp8", "fp8_rollout", "bf16")
    console = Console(record=True, width=120)
    assert run_diff(options(policy, prompts, tmp_path, *precisions), console) == 1
    assert list(recordings) == ["fp8", None]
    reports = {r["precision"]: r for r in json.loads((tmp_path / "report.json").read_text())["precisions"]}
    for report in reports.values():
        assert not report["equal"] and report["trainer_against_rollout"]["k3_kl"] > 0
        assert report["all_corrected"] == dict(tokens=3 * RESPONSE, differing=0, k3_kl=0.0, p999=0.0, max=0.0)
        assert report["first_difference"]["ulps"] > 0
    assert console.export_text().count(f"all corrected: 0 (0 of {3 * RESPONSE} tokens differ)") == 3

    def share(precision, kind):
        return max(row["own"]["share"] for row in reports[precision]["operations"] if row["kind"] == kind)

    # The unified flow has no difference in a linear layer; the FP8 rollout has most of its difference there.
    assert share("jet_fp8", "linear") == 0 < share("jet_fp8", "norm")
    assert share("fp8_rollout", "linear") > 0.5
    kinds = {name: report["kinds"] for name, report in reports.items()}
    whole = reports["fp8_rollout"]["trainer_against_recorded_rollout"]["k3_kl"]
    assert kinds["fp8_rollout"]["linear"]["without"]["k3_kl"] < 0.5 * whole
    assert kinds["jet_fp8"]["linear"]["alone"]["k3_kl"] == 0


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--response", "100000", "--precision", "bf16"], "use shorter prompts or a smaller --response"),
        (["--sequence", __file__], "is not a readable sequence of a stopped run ("),
        (["--precision", "jet_fp8", "jetrl.scale_rule=e8m0"], "jetrl.scale_rule=e8m0 is not supported"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_invalid_comparison_is_one_sentence_and_status_2(policy, tmp_path, arguments, sentence):
    result = CliRunner().invoke(app, ["diff", str(policy), "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1


def test_a_dead_engine_is_an_error_with_its_log(exact, tmp_path, monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "false")
    with pytest.raises(UserError, match="the rollout engine ended with status 1; its log is .*engine.log"):
        run.run_engine(exact[2][0], tmp_path, "engine", False)
    assert (tmp_path / "engine.log").is_file()

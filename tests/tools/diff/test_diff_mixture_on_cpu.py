# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` of a mixture of experts: equal under jet_fp8_exact, differences attributed."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine_here import planted, run_here
from rich.console import Console
from tiny_models import save_policy

from jetrl_verl import kernels
from jetrl_verl.tools.diff import rollout, run
from jetrl_verl.tools.diff.attribution import attribute
from jetrl_verl.tools.diff.operations import Operation, chosen_of, dense_choice
from jetrl_verl.tools.diff.run import DiffOptions, run_diff
from jetrl_verl.tools.diff.trainer import Trainer

RESPONSE, TEMPERATURE = 8, 0.7
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(scope="module")
def compared(policy, tmp_path_factory, cpu_platform):
    """(reports, requests, recordings) by precision, and the output, of one run of the command."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("7+5", "12+30+41")))
    requests, recordings = {}, {}

    def engine(request, folder, name, cuda):
        """One engine per precision; all generate the responses of the first."""
        kind = "bf16" if request.jetrl is None else request.jetrl["precision"]
        if kind not in recordings:
            requests[kind] = request
            recordings[kind] = run_here(request, [[5] * RESPONSE] * 2, max_num_seqs=2, enforce_eager=True)
        return recordings[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_engine", engine)
        out, console = tmp_path_factory.mktemp("out"), Console(record=True, width=120)
        precisions = ("jet_fp8_exact", "fp8_rollout", "bf16")
        options = DiffOptions(policy, precisions, prompts, 2, RESPONSE, TEMPERATURE, out)
        assert run_diff(options, console) == 1
    reports = {r["precision"]: r for r in json.loads((out / "report.json").read_text())["precisions"]}
    return reports, requests, recordings, console.export_text()


@pytest.fixture(scope="module")
def trainer(policy, compared):
    request = compared[1]["jet_fp8_exact"]
    return Trainer(policy, rollout.Job.of(request.jetrl), request, TEMPERATURE, CPU)


def test_taps_are_removed_after_the_run(compared):
    assert kernels.route_and_permute.__module__ == "jetrl_verl.kernels.route_and_permute"
    assert kernels.combine.__module__ == "jetrl_verl.kernels.combine"


def test_exact_differs_nowhere(compared):
    report = compared[0]["jet_fp8_exact"]
    assert report["equal"] and report["first_difference"] is None and report["tokens"] == 2 * RESPONSE
    names = [row["operation"] for row in report["operations"] if row["layer"] == 1]
    assert names[-5:] == ["post_norm", "router", "choice", "experts", "combine"]
    assert len(report["operations"]) == 2 * len(names) - 1 + 5
    for row in report["operations"]:
        assert row["elements"] > 0 and row["own"] == row["accumulated"] == dict(share=0.0, ulps=0)
    widths = {row["operation"]: row["elements"] for row in report["operations"] if row["layer"] == 1}
    tokens = widths["combine"] // 256
    assert widths["router"] == widths["choice"] == 8 * tokens and widths["experts"] == 2 * 256 * tokens


def test_recorded_choices_and_experts_give_the_mixtures_output(compared):
    """The choice follows from the recorded logits, the combination from the recorded experts."""
    outputs = compared[2]["jet_fp8_exact"].outputs
    for layer in range(2):
        logits, choice, experts, combined = (
            outputs[Operation(layer, name)] for name in ("router", "choice", "experts", "combine")
        )
        chosen, weights = kernels.route(logits, 2, True)
        assert torch.equal(dense_choice(chosen, weights, 8), choice)
        assert all(torch.equal(a, b) for a, b in zip(chosen_of(choice, 2), (chosen, weights), strict=True))
        rows = torch.arange(len(logits) * 2, dtype=torch.int32).view(-1, 2)
        assert torch.equal(kernels.combine(experts.reshape(-1, 256), rows), combined)
        assert len(set(chosen[:, 0].tolist())) > 1


@pytest.mark.parametrize("precision", ["fp8_rollout", "bf16"])
def test_differences_of_stock_engines_are_attributed_completely(compared, precision):
    report = compared[0][precision]
    assert not report["equal"] and report["all_corrected"]["differing"] == 0
    names = {row["operation"] for row in report["operations"]}
    assert {"router", "choice", "experts"} <= names and "combine" not in names
    assert list(report["kinds"])[5:7] == ["router", "choice"]
    assert compared[3].count("all corrected: 0 (0 of") == 3

    def own(name):
        return max(row["own"]["share"] for row in report["operations"] if row["operation"] == name)

    # vLLM quantizes the experts under fp8_rollout; under bf16 both sides multiply in BF16.
    assert own("experts") > (0.5 if precision == "fp8_rollout" else 0)
    # The flow's operator leaves weights in FP32; Hugging Face rounds them to BF16, and so does vLLM on a CPU.
    assert (own("choice") > 0) == (precision == "fp8_rollout")


# Function of kernels, its calls in a forward, the one with another bit; operation, token and element.
PLANTS = {"logits": ("logits", 3, 1, "router", 9, 6), "combine": ("combine", 2, 1, "combine", 11, 200)}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bit_is_named(plant, compared, trainer):
    *call, operation, row, element = PLANTS[plant]
    recording = compared[2]["jet_fp8_exact"]
    with planted(*call, row, element):
        result = attribute(trainer, recording)
    first = result.first
    assert (first.layer, first.operation, first.element) == (1, operation, element)
    assert (first.request, first.position) == recording.place(row) and first.ulps == 1
    assert {o: s.differing for o, s in result.local.items() if s.differing} == {Operation(1, operation): 1}
    assert result.all_corrected.differing == 0 and result.alone == {Operation(1, operation).kind: result.mismatch}


def test_a_token_sent_to_another_expert_is_a_different_choice(compared, trainer):
    """The trainer's first layer sends one token to its second and third expert: only the choice differs."""
    recording, route, count = compared[2]["jet_fp8_exact"], kernels.route, iter(range(10**6))

    def elsewhere(logits, k, renormalize):
        chosen, weights = route(logits, k, renormalize)
        if next(count) % 2 == 0:
            others, _ = route(logits, k + 1, renormalize)
            chosen = chosen.clone()
            chosen[13] = others[13, 1:]
        return chosen, weights

    with mock.patch.object(kernels, "route", elsewhere):
        result = attribute(trainer, recording)
    assert (result.first.layer, result.first.operation) == (0, "choice")
    assert (result.first.request, result.first.position) == recording.place(13)
    assert {o for o, s in result.local.items() if s.differing} == {Operation(0, "choice")}
    assert result.without["choice"].differing == result.all_corrected.differing == 0


def test_a_choice_is_corrected_only_where_it_is_the_local_one(trainer):
    from jetrl_verl.tools.diff.attribution import _Forwards

    operation = Operation(0, "choice")
    recorded = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0], [0.5, 0.5, 0.0]])
    local = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    trained = torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.625, 0.375, 0.0], [0.5, 0.0, 0.5]])
    forwards = _Forwards(trainer, SimpleNamespace(outputs={operation: recorded}))
    forwards._local = {operation: local}
    expected = torch.stack([recorded[0], trained[1], torch.tensor([0.875, 0.125, 0.0]), trained[3]])
    assert torch.equal(forwards._correct(operation, trained), expected)
    assert torch.equal(forwards._correct(operation, local), recorded)

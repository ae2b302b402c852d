# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` with ``jetrl.kv_cache=fp8``: equal if both sides have it, attributed to its own kind if one has it."""

import json

import pytest
import torch
from engine_here import run_here
from rich.console import Console
from tiny_models import save_policy

from jetrl_verl import kernels
from jetrl_verl.tools.diff import run
from jetrl_verl.tools.diff.operations import Operation
from jetrl_verl.tools.diff.run import DiffOptions, run_diff

RESPONSE = 8
CACHED = [Operation(layer, name) for layer in range(2) for name in ("k_cache", "v_cache")]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.fixture
def compared(policy, tmp_path, cpu_platform, monkeypatch):
    """Callable precision -> (status, report, output, recording): the command, with one engine in this process."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [3 + i] * (9 + 7 * i)}) for i in range(2)))
    answers = [[5 + i, 7, 9, 4, 8, 6, 5, 10] for i in range(2)]
    recordings = []

    def engine(request, *args):
        if not recordings:
            recordings.append(run_here(request, answers, max_num_seqs=2, enable_prefix_caching=False))
        return recordings[0]

    def compare(precision):
        monkeypatch.setattr(run, "run_engine", engine)
        options = DiffOptions(policy, (precision,), prompts, 2, RESPONSE, 1.0, tmp_path, ("jetrl.kv_cache=fp8",))
        console = Console(record=True, width=120)
        status = run_diff(options, console)
        (report,) = json.loads((tmp_path / "report.json").read_text())["precisions"]
        return status, report, console.export_text(), recordings[0]

    return compare


def own(report, kind) -> list[float]:
    return [row["own"]["share"] for row in report["operations"] if row["kind"] == kind]


def test_equal_with_an_fp8_cache_on_both_sides(compared):
    status, report, output, recording = compared("jet_fp8_exact")
    assert status == 0 and report["equal"] and report["first_difference"] is None
    assert report["options"]["kv_cache"] == "fp8"
    assert own(report, "kv_cache") == [0.0] * 4
    assert "precision=jet_fp8_exact jetrl.kv_cache=fp8: 16 log-probabilities equal in all 32 bits" in output
    # The recorded values are on the grid of the cache and differ from its inputs.
    for operation in CACHED:
        rows = recording.outputs[operation].unflatten(1, (-1, 128))
        assert torch.equal(kernels.quantize_kv(rows, rows)[1], rows)
        source = "k_rotary" if operation.name == "k_cache" else "v_proj"
        assert not torch.equal(recording.outputs[Operation(operation.layer, source)], recording.outputs[operation])


def test_an_fp8_cache_in_the_rollout_only_is_attributed(compared):
    status, report, output, _ = compared("fp8_rollout")
    assert status == 1 and not report["equal"]
    # E4M3 changes nearly every number.
    assert min(own(report, "kv_cache")) > 0.5
    assert report["kinds"]["kv_cache"]["alone"]["k3_kl"] > 0
    assert report["all_corrected"]["differing"] == 0
    assert "kv_cache" in output and "precision=fp8_rollout jetrl.kv_cache=fp8: log-probabilities" in output

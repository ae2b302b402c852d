# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` with ``jetrl.kv_cache=fp8``: equal if both sides have it, attributed to its own kind if one has it."""

import pytest
import torch
from engine_here import comparer
from tiny_models import save_policy

from jetrl_verl import kernels
from jetrl_verl.tools.diff.operations import Operation

CACHED = [Operation(layer, name) for layer in range(2) for name in ("k_cache", "v_cache")]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.fixture
def compared(policy, tmp_path, cpu_platform, monkeypatch):
    return comparer(policy, tmp_path, monkeypatch, ("jetrl.kv_cache=fp8",))


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

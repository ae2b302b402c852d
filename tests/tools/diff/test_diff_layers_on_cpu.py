# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` of hybrids and of ``jetrl.kv_cache=fp8``: equal under jet_fp8_exact; a difference has its kind."""

from importlib.util import find_spec

import pytest
import torch
from engine_here import comparer
from tiny_models import HYBRIDS, save_policy

from jetrl_verl import kernels
from jetrl_verl.inputs import UserError
from jetrl_verl.nn.chunked_logits import UNUSED
from jetrl_verl.tools.diff.operations import Operation

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=HYBRIDS)
def compare(request, tmp_path_factory, cpu_platform):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        compare = comparer(save_policy(folder / "policy", request.param), folder, patch, block_size=64)
        compare.family = request.param
        yield compare


def test_equal_in_every_operation(compare):
    status, report, _, recording = compare("jet_fp8_exact")
    assert status == 0 and report["equal"] and report["first_difference"] is None
    # 16 operations in each of two linear layers, 18 in the full one, no residual sum at the first; of a mixture four of
    # its experts, the logit of the shared one's gate and the sum.
    of_experts = 6 if compare.family == "qwen3_5_moe" else 0
    assert len(report["operations"]) == 2 * 16 + 18 - 1 + 5 + 3 * of_experts
    # Placeholders of images and videos, which verl masks where it finds the model's processor.
    masked = (recording.outputs[Operation(None, "lm_head")] == UNUSED).sum(1)
    assert masked.unique().tolist() == [2 if find_spec("torchvision") else 0]


@pytest.mark.parametrize("compare", ["qwen3_5_moe"], indirect=True)
def test_a_difference_of_the_shared_expert_is_named(compare, monkeypatch):
    stock = kernels.add_shared_expert
    monkeypatch.setattr(kernels, "add_shared_expert", lambda *args: stock(*args) * 1.0078125)
    _, report, *_ = compare("jet_fp8_exact")
    assert (report["first_difference"]["layer"], report["first_difference"]["operation"]) == (0, "shared_sum")
    assert report["all_corrected"]["differing"] == 0


@pytest.mark.parametrize("compare", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize(("function", "named"), [("causal_conv1d", "convolution"), ("gated_delta_rule", "delta_rule")])
def test_a_difference_of_the_trainer_is_named(compare, monkeypatch, function, named):
    stock = getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *args: stock(*args) * 1.0078125)
    _, report, *_ = compare("jet_fp8_exact")
    assert (report["first_difference"]["layer"], report["first_difference"]["operation"]) == (0, named)
    assert report["all_corrected"]["differing"] == 0


def test_stock_delta_nets_are_refused(compare):
    message = (
        "precision=fp8_rollout with the model .* is not supported with jetrl diff of stock operations: a delta net"
    )
    with pytest.raises(UserError, match=message):
        compare("fp8_rollout")


CACHED = [Operation(layer, name) for layer in range(2) for name in ("k_cache", "v_cache")]


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

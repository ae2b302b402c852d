# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` of hybrids: equal under jet_fp8_exact, and a planted difference is named by its operation."""

from importlib.util import find_spec

import pytest
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

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``jetrl diff`` of a hybrid: equal under jet_fp8_exact, and a planted difference is named by its operation."""

import pytest
from engine_here import comparer
from tiny_models import save_policy

from jetrl_verl import kernels
from jetrl_verl.inputs import UserError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def compare(tmp_path_factory, cpu_platform):
    folder = tmp_path_factory.mktemp("hybrid")
    with pytest.MonkeyPatch.context() as patch:
        yield comparer(save_policy(folder / "policy", "qwen3_5"), folder, patch, block_size=64)


def test_equal_in_every_operation(compare):
    status, report, *_ = compare("jet_fp8_exact")
    assert status == 0 and report["equal"] and report["first_difference"] is None
    # 16 operations in each of two linear layers, 18 in the full one, no residual sum at the first.
    assert len(report["operations"]) == 2 * 16 + 18 - 1 + 5


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

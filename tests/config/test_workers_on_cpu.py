# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the driver asks each node before an actor takes a GPU, and what it says of the answers.

That a worker without the plugin stops a real driver is shown in tests/config/test_command_line_on_cpu.py.
"""

import re

import pytest

from jetrl_verl.config.workers import _probe, complaint_about


def worker(**changes) -> dict:
    """What the probe finds on a node like this one."""
    answer = _probe()()
    return answer | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plugin": "0.0.9"}, "has jetrl-verl 0.0.9; install the driver's version"),
        ({"plugin": None}, "does not have the plugin installed"),
        ({"versions": {"verl": "0.8.0"}}, "the driver runs verl .*, but .* has 0.8.0; install the same version"),
        ({"vllm_plugin": False}, "lacks the entry point that vLLM loads"),
        ({"vllm_plugins_filter": "other"}, "VLLM_PLUGINS=other keeps vLLM from loading the plugin"),
        ({"capabilities": [(8, 0), (9, 0)]}, "compute capability 8.0, and FP8 needs 8.9"),
    ],
)
def test_a_node_that_cannot_take_part_is_named_with_its_reason(changes, sentence):
    assert re.search(sentence, complaint_about(worker(**changes)))


@pytest.mark.parametrize("changes", [{}, {"vllm_plugins_filter": "other,jetrl"}, {"capabilities": [(9, 0)]}])
def test_a_node_like_this_one_takes_part(changes):
    assert complaint_about(worker(**changes)) == ""


@pytest.mark.parametrize("capabilities", [[(8, 9)], [(9, 0), (10, 0)]])
def test_a_gpu_without_the_shared_operations_is_named_where_the_job_shares_them(capabilities):
    found = worker(capabilities=capabilities)
    assert complaint_about(found, "stock") == ""
    assert "the shared operations need 9.0; use precision=jet_fp8 jetrl.operations=stock" in complaint_about(
        found, "shared"
    )

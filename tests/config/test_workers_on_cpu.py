# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the driver asks each node before an actor takes a GPU, and what it says of the answers.

That a worker without the plugin stops a real driver is shown in tests/config/test_command_line_on_cpu.py.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jetrl_verl.config.hopper_kernels import missing
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.limits import WGRAD_IN_TRITON
from jetrl_verl.config.workers import _probe, check_workers, complaint_about, without_kernels
from jetrl_verl.kernels import native

JET = JetConfig("jet_fp8", train="fp8", rollout="fp8")


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
        (
            {"capabilities": [(8, 0), (9, 0)]},
            "capability 8.0, is not supported with precision=jet_fp8: .* Set precision=bf16$",
        ),
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
    assert complaint_about(found, JET) == ""
    use = "Set precision=jet_fp8 jetrl.operations=stock, or precision=bf16"
    said = complaint_about(found, replace(JET, operations="shared"))
    assert said.endswith(f"not supported with jetrl.operations=shared: FlashAttention 3 needs 9.0. {use}")


def test_nodes_of_hopper_gpus_without_kernels_are_found():
    nodes = {
        "10.0.0.1": worker(capabilities=[(9, 0)], kernels=False),
        "10.0.0.2": worker(capabilities=[(9, 0)], kernels=True),
        "10.0.0.3": worker(capabilities=[(8, 9)], kernels=False),
        "10.0.0.4": worker(capabilities=[], kernels=False),
    }
    assert without_kernels(nodes) == ["10.0.0.1"]


def test_the_probe_looks_where_the_library_is_loaded_from():
    assert worker()["kernels"] == native.library_path().is_file()


@pytest.mark.parametrize(
    ("options", "says", "remedy"),
    [
        (JET, f"WGrad runs in Triton at {WGRAD_IN_TRITON} of BF16's speed", "jetrl.backward=bf16"),
        (JetConfig("jet_fp8", train="fp8", rollout="fp8", backward="bf16"), "CUTLASS kernel", "make wheel"),
        (JetConfig("fp8_rollout", train="bf16", rollout="fp8"), "CUTLASS kernel", "make wheel"),
    ],
)
def test_the_line_says_the_price_and_what_to_do(options, says, remedy):
    line = missing(options, ["10.0.0.1", "10.0.0.5"])
    assert says in line and remedy in line and "10.0.0.1, 10.0.0.5" in line and "\n" not in line
    assert ("jetrl.backward" in line) == (options == JET)
    assert missing(options, []) == ""


def test_a_job_that_calls_no_such_kernel_hears_nothing():
    assert missing(JetConfig("int8_rollout", train="bf16", rollout="int8"), ["10.0.0.1"]) == ""


@pytest.mark.parametrize("kernels", [True, False])
def test_the_driver_says_it_once_after_every_node_has_answered(kernels, monkeypatch, capsys):
    """A cluster of two nodes, played: what Ray would bring back is given, everything of ours runs."""
    answer = worker(capabilities=[(9, 0)], kernels=kernels)
    calls = SimpleNamespace(
        remote=lambda **options: (
            lambda probe: SimpleNamespace(options=lambda **where: SimpleNamespace(remote=lambda: answer))
        ),
        nodes=lambda: [
            {"Alive": True, "NodeID": name, "NodeManagerAddress": name, "Resources": {"GPU": 8.0}} for name in "ab"
        ],
        get=lambda value, timeout: value,
    )
    for name, call in vars(calls).items():
        monkeypatch.setattr(f"ray.{name}", call)
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy", lambda node, soft: (node, soft)
    )
    check_workers(JET)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (0 if kernels else 1)
    assert kernels or "on a, b:" in said[0]
    check_workers()
    assert capsys.readouterr().err == ""

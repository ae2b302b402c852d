# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The driver's check of each node before an actor gets a GPU, and its messages.

test_command_line_on_cpu.py stops a real driver whose workers lack the plugin."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jetrl_verl.config.hopper_kernels import missing
from jetrl_verl.config.job import Job
from jetrl_verl.config.options import JetConfig
from jetrl_verl.config.support.limits import WGRAD_IN_TRITON
from jetrl_verl.config.support.table import refusal
from jetrl_verl.config.workers import answer_here, check_workers, complaint_about, gpu_complaint, without_kernels
from jetrl_verl.kernels import native

JET = JetConfig("jet_fp8", train="fp8", rollout="fp8")


def worker(**changes) -> dict:
    """The probe's answer on a node like this one, with changes."""
    return answer_here() | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plugin": "0.0.9"}, "has jetrl-verl 0.0.9; install the driver's version"),
        ({"plugin": None}, "does not have the plugin installed"),
        ({"versions": {"verl": "0.8.0"}}, "the driver runs verl .*, but .* has 0.8.0; install the same version"),
        ({"vllm_plugin": False}, "lacks the entry point that vLLM loads"),
        ({"vllm_plugins_filter": "other"}, "VLLM_PLUGINS=other keeps vLLM from loading the plugin"),
    ],
)
def test_an_unsupported_node_is_named_with_its_reason(changes, sentence):
    assert re.search(sentence, complaint_about(worker(**changes)))


@pytest.mark.parametrize("changes", [{}, {"vllm_plugins_filter": "other,jetrl"}, {"capabilities": [(9, 0)]}])
def test_a_node_like_this_one_is_accepted(changes):
    assert complaint_about(worker(**changes)) == ""


STOCK, SHARED = Job(JET), Job(replace(JET, operations="shared"))
CACHE = Job(JetConfig("fp8_rollout", train="bf16", rollout="fp8", kv_cache="fp8"))
HOPPER, L40S, A100 = {"capabilities": [(9, 0)]}, {"capabilities": [(9, 0), (8, 9)]}, {"capabilities": [(8, 0)]}


@pytest.mark.parametrize(
    ("job", "changes", "resources", "name", "what"),
    [
        (STOCK, A100, {"GPU": 8.0}, "gpu_without_fp8", "a GPU of compute capability 8.0"),
        (SHARED, A100, {"GPU": 8.0}, "gpu_without_fp8", "a GPU of compute capability 8.0"),
        (SHARED, L40S, {"GPU": 8.0}, "gpu_other_than_hopper", "a GPU of compute capability 8.9"),
        (SHARED, HOPPER | {"flash_attention_3": False}, {"GPU": 8.0}, "no_flash_attention_3", ""),
        (CACHE, L40S, {"GPU": 8.0}, "gpu_of_an_fp8_cache", "a GPU of compute capability 8.9"),
        (STOCK, {}, {"GPU": 8.0, "accelerator_type:AMD-Instinct-MI300X-OAM": 1.0}, "rocm", ""),
        (STOCK, {}, {"NPU": 8.0}, "npu", ""),
    ],
)
def test_gpus_that_cannot_run_the_job_are_refused_by_their_row(job, changes, resources, name, what):
    complaint = gpu_complaint(worker(**{"flash_attention_3": True, **changes}), resources, job)
    assert f"{complaint}." == refusal(name, precision=job.options.precision, what=what)


@pytest.mark.parametrize(
    ("job", "changes", "resources"),
    [
        (STOCK, L40S, {"GPU": 8.0, "accelerator_type:L40S": 1.0}),
        (SHARED, HOPPER, {"GPU": 8.0, "accelerator_type:H100": 1.0}),
        (CACHE, HOPPER, {"GPU": 8.0}),
        (SHARED, A100, {"CPU": 8.0}),  # Ray gives out none of its GPUs
    ],
)
def test_gpus_that_run_the_job_are_accepted(job, changes, resources):
    assert gpu_complaint(worker(**{"flash_attention_3": True, **changes}), resources, job) == ""


def test_a_node_without_the_drivers_flash_attn_is_refused():
    node, job = worker(flash_attn=False, **HOPPER), replace(STOCK, flash_attention=True)
    assert gpu_complaint(node, {"GPU": 8.0}, STOCK) == gpu_complaint(node, {}, job) == ""
    complaint = gpu_complaint(node, {"GPU": 8.0}, job)
    assert "flash_attention_2 is not supported with precision=jet_fp8: it is installed in the driver's" in complaint
    assert complaint.endswith("attn_implementation=jetrl_varlen")


def test_the_gpus_of_a_run_on_the_cpu_platform_do_not_matter(monkeypatch):
    """Such a run declares the resource GPU for verl's sake."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert gpu_complaint(worker(**A100, flash_attention_3=False), {"GPU": 1.0}, SHARED) == ""


def test_nodes_of_hopper_gpus_without_kernels_are_found():
    nodes = {
        "10.0.0.1": worker(capabilities=[(9, 0)], kernels=False),
        "10.0.0.2": worker(capabilities=[(9, 0)], kernels=True),
        "10.0.0.3": worker(capabilities=[(8, 9)], kernels=False),
        "10.0.0.4": worker(capabilities=[], kernels=False),
    }
    assert without_kernels(nodes) == ["10.0.0.1"]


def test_the_probe_looks_for_the_library_that_is_loaded():
    assert worker()["kernels"] == native.library_path().is_file()


@pytest.mark.parametrize(
    ("options", "slowdown", "remedy"),
    [
        (JET, f"WGrad runs in Triton at {WGRAD_IN_TRITON} of BF16's speed", "jetrl.backward=bf16"),
        (JetConfig("jet_fp8", train="fp8", rollout="fp8", backward="bf16"), "CUTLASS kernel", "make wheel"),
        (JetConfig("fp8_rollout", train="bf16", rollout="fp8"), "CUTLASS kernel", "make wheel"),
    ],
)
def test_the_note_on_missing_kernels_names_slowdown_and_remedy(options, slowdown, remedy):
    line = missing(options, ["10.0.0.1", "10.0.0.5"])
    assert slowdown in line and remedy in line and "10.0.0.1, 10.0.0.5" in line and "\n" not in line
    assert ("jetrl.backward" in line) == (options == JET)
    assert missing(options, []) == ""


def test_a_job_without_these_kernels_gets_no_note():
    assert missing(JetConfig("int8_rollout", train="bf16", rollout="int8"), ["10.0.0.1"]) == ""


@pytest.mark.parametrize("kernels", [True, False])
def test_the_driver_prints_the_note_once_for_all_nodes(kernels, monkeypatch, capsys):
    """A simulated cluster of two nodes: Ray's answers are fixed, the plugin's code is real."""
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
    check_workers(STOCK)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if kernels else 1)
    assert kernels or "on a, b:" in lines[0]
    check_workers()
    assert capsys.readouterr().err == ""

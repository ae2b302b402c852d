# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Host work of a weight sync and of a layer, counted without a GPU by weight_sync.py and layer_host_time.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LAUNCHES = ("kernels", "triton", "native", "flash attention")


def run(script: str, *words: str, folder: Path) -> dict:
    """Results by precision, from a process of its own."""
    out = folder / "out.json"
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), *words, "--repetitions", "1", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads(out.read_text())["precisions"]


@pytest.fixture(scope="module")
def sync(tmp_path_factory) -> dict:
    """36 layers as at 4B, as narrow as the formats allow."""
    return run("weight_sync", "--layers", "36", "--narrow", folder=tmp_path_factory.mktemp("sync"))


@pytest.fixture(scope="module")
def layer(tmp_path_factory) -> dict:
    return run("layer_host_time", "--layers", "1", folder=tmp_path_factory.mktemp("layer"))


def operators(sync: dict, precision: str, side: str, part: str = "stream") -> int:
    return sum(sync[precision]["counts"][side]["operators"][part].values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("side", "most", "views"), [("sender", 265, 1250), ("receiver", 185, 1600)])
def test_each_side_of_a_sync_calls_fewer_operators_than_bf16(sync, side, most, views):
    counts = sync["jet_fp8"]["counts"][side]
    assert 0 < operators(sync, "jet_fp8", side) <= most < operators(sync, "bf16", side)
    assert 0 < counts["views"]["stream"] <= views < sync["bf16"]["counts"][side]["views"]["stream"]


def test_weights_are_quantized_and_sent_in_batches(sync):
    assert operators(sync, "jet_fp8", "sender", "quantizer") == 3 * 36 // 3, "three widths, three layers together"
    assert sync["jet_fp8"]["counts"]["pieces"] <= 51 < sync["bf16"]["counts"]["pieces"] == 399


def test_waits_of_a_sync_do_not_grow_with_the_layers(sync):
    waits = {side: sum(sync["jet_fp8"]["counts"][side]["waits"].values()) for side in ("sender", "receiver")}
    # One of the receiver's is the probe's write into pages, which waits on a CPU alone.
    assert waits["sender"] <= 3 and waits["receiver"] <= 6


def launches(layer: dict, precision: str, phase: str) -> float:
    return sum(layer[precision]["counts"][phase].get(kind, 0) for kind in LAUNCHES)


def test_an_fp8_layer_has_under_half_the_launches_of_the_stock_layer(layer):
    assert launches(layer, "bf16", "forward") > 50 and launches(layer, "bf16", "backward") > 150
    for phase, most in (("forward", 24), ("backward", 70)):
        assert 0 < launches(layer, "jet_fp8", phase) <= most
        assert launches(layer, "jet_fp8", phase) < launches(layer, "bf16", phase) / 2
        assert launches(layer, "bf16_shared", phase) < launches(layer, "bf16", phase) / 3


def test_no_layer_waits_for_the_device(layer):
    waits = {"_local_scalar_dense", "nonzero", "item", "equal"}
    for result in layer.values():
        for phase in ("forward", "backward"):
            assert not [name for name, count in result["names"][phase].items() if name in waits and count]

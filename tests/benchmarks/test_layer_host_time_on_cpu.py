# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/layer_host_time.py counts a layer's launches without a GPU; their number may fall and not rise unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCHES = ("kernels", "triton", "native", "flash attention")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """In a process of its own: it tells Triton that there is a GPU."""
    out = tmp_path_factory.mktemp("layer") / "out.json"
    command = [sys.executable, ROOT / "benchmarks/layer_host_time.py", "--layers", "1", "--repetitions", "1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(out)], env=environment, check=True, capture_output=True)
    return json.loads(out.read_text())["precisions"]


def launches(found: dict, precision: str, phase: str) -> float:
    return sum(found[precision]["counts"][phase].get(kind, 0) for kind in LAUNCHES)


def test_a_layer_in_fp8_has_under_half_of_the_stock_layers_launches(found):
    assert launches(found, "bf16", "forward") > 50 and launches(found, "bf16", "backward") > 150
    for phase, most in (("forward", 24), ("backward", 70)):
        assert 0 < launches(found, "jet_fp8", phase) <= most
        assert launches(found, "jet_fp8", phase) < launches(found, "bf16", phase) / 2
        assert launches(found, "bf16_shared", phase) < launches(found, "bf16", phase) / 3


def test_no_layer_waits_for_the_device(found):
    waits = {"_local_scalar_dense", "nonzero", "item", "equal"}
    for result in found.values():
        for phase in ("forward", "backward"):
            assert not [name for name, count in result["names"][phase].items() if name in waits and count]


def test_every_phase_has_a_time(found):
    for result in found.values():
        assert all(len(result["seconds"][phase]) == 1 for phase in ("forward", "backward"))

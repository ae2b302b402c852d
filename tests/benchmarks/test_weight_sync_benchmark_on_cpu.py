# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/weight_sync.py counts what both sides of a weight sync call; the counts may fall and not rise unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.advise_sync import counted, launches, narrow, recorded
from jetrl_verl.tools.advise.sync import stacks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Of 36 layers as at 4B, as thin as the formats allow."""
    out = tmp_path_factory.mktemp("sync") / "out.json"
    command = [sys.executable, ROOT / "benchmarks/weight_sync.py", "--layers", "36", "--narrow", "--repetitions", "1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(out)], env=environment, check=True, capture_output=True)
    return json.loads(out.read_text())["precisions"]


def operators(found: dict, precision: str, side: str, part: str = "stream") -> int:
    return sum(found[precision]["counts"][side]["operators"][part].values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("side", "most", "views"), [("sender", 265, 1250), ("receiver", 185, 1600)])
def test_a_side_calls_less_than_bf16s(found, side, most, views):
    counts = found["jet_fp8"]["counts"][side]
    assert 0 < operators(found, "jet_fp8", side) <= most < operators(found, "bf16", side)
    assert 0 < counts["views"]["stream"] <= views < found["bf16"]["counts"][side]["views"]["stream"]


def test_weights_are_quantized_and_sent_by_the_stack(found):
    assert operators(found, "jet_fp8", "sender", "quantizer") == 3 * 36 // 3, "three widths, three layers together"
    assert found["jet_fp8"]["counts"]["pieces"] <= 51 < found["bf16"]["counts"]["pieces"] == 399


def test_waits_do_not_grow_with_the_layers(found):
    waits = {side: sum(found["jet_fp8"]["counts"][side]["waits"].values()) for side in ("sender", "receiver")}
    # One of the receiver's is the probe's write into pages, which waits on a CPU alone.
    assert waits["sender"] <= 3 and waits["receiver"] <= 6


def test_advise_knows_what_is_called(found):
    """Its stacks are those of the sync, and the record of counts that it is fitted to is of the code as it is."""
    assert stacks(*narrow("4b"), quantized=True) == operators(found, "jet_fp8", "sender", "quantizer")
    for precision in ("bf16", "jet_fp8"):
        kept = recorded(counted("4b"))["precisions"][precision]["counts"]
        assert launches(found[precision]["counts"]) == pytest.approx(launches(kept), rel=0.03), "take the counts again"

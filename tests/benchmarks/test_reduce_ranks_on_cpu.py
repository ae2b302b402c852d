# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/reduce_ranks.py: processes joined as an engine's workers add their products, and a way with other bits is
seen."""

import json

import pytest

from benchmarks import reduce_ranks


@pytest.mark.timeout(300)
def test_two_processes_reduce_in_each_way_of_a_cpu_with_the_bits(tmp_path, capfd):
    out = tmp_path / "found.json"
    assert reduce_ranks.main(["--ranks", "2", "--tiny", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    names = [(record["rows"], record["way"]) for record in found["records"]]
    assert names == [(rows, way) for rows in (1, 8) for way in ("stock", "gathered", "by rows")]
    # vLLM's own on a CPU cuts sums where the processor has no instructions for BF16.
    assert all(record["equal"] for record in found["records"] if record["way"] != "stock")
    assert all(record["us"] > 0 and not record["captured"] for record in found["records"])


def record(us: float, equal: bool) -> dict:
    return {"rows": 1, "way": "gathered", "captured": True, "equal": equal, "us": us}


def test_the_slowest_rank_counts_and_one_with_other_bits_is_enough():
    assert reduce_ranks.slowest([[record(3.0, True)], [record(5.0, True)]]) == [record(5.0, True)]
    assert reduce_ranks.slowest([[record(3.0, False)], [record(2.0, True)]]) == [record(3.0, False)]


def test_a_machine_with_fewer_gpus_says_so(capsys):
    with pytest.raises(SystemExit):
        reduce_ranks.main(["--ranks", "64"])
    assert "--ranks 64 is not supported with" in capsys.readouterr().err

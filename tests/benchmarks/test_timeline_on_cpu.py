# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""timeline.py on a trace in which every millisecond is known."""

import gzip
import json

import pytest

from benchmarks import timeline

MAIN, BACKWARD, WATCHDOG, STREAM, OTHER_STREAM = 1, 2, 3, 7, 8
EVENTS = [
    # name, category, thread or stream, begin, duration (ms)
    ("log_prob", "user_annotation", MAIN, 1000, 4000),
    ("inner mark", "user_annotation", MAIN, 1500, 100),
    ("aten::mm", "cpu_op", MAIN, 1000, 1000),
    ("cudaLaunchKernel", "cuda_runtime", MAIN, 1400, 100),
    ("gemm", "kernel", STREAM, 1500, 1500),
    ("ncclAllGather", "kernel", OTHER_STREAM, 2500, 1000),
    ("cudaMalloc", "cuda_runtime", MAIN, 4000, 500),
    ("update", "user_annotation", MAIN, 6000, 4000),
    ("cudaLaunchKernel", "cuda_runtime", BACKWARD, 7000, 1000),
    ("gemm", "kernel", STREAM, 8000, 1000),
    ("gemm", "kernel", STREAM, 9000, 500),
    ("cudaEventQuery", "cuda_runtime", WATCHDOG, 6000, 4000),
]


@pytest.fixture
def trace(tmp_path):
    """The trace as torch writes it: in any order, with events that have no duration."""
    keys = ("name", "cat", "tid", "ts", "dur")
    in_us = ((*words, begin * 1000, duration * 1000) for *words, begin, duration in reversed(EVENTS))
    events = [{"ph": "X", "pid": 9, **dict(zip(keys, event))} for event in in_us]
    path = tmp_path / "actor_train_step7_rank0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name", "pid": 9}]}, file)
    return path


def test_phases_are_the_outermost_marks_and_what_lies_between(trace):
    events = timeline.load(trace)
    assert timeline.phases(events) == [
        ("start to log_prob", (1e6, 1e6)),
        ("log_prob", (1e6, 5e6)),
        ("log_prob to update", (5e6, 6e6)),
        ("update", (6e6, 10e6)),
        ("update to end", (10e6, 10e6)),
    ]


def test_every_second_of_a_phase_has_a_name(trace, capsys):
    timeline.main([str(trace)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    log_prob, between, update = (
        next(place for place, line in enumerate(lines) if line.startswith(f"{name}: "))
        for name in ("log_prob", "log_prob to update", "update")
    )
    assert lines[log_prob:between] == [
        "log_prob: 4.000 s, busy 2.000, NCCL alone 0.500, idle 2.000",
        "1.500 s 1 x gemm",
        "1.000 s 1 x ncclAllGather",
        "0.500 s idle: Python before cudaMalloc",
        "0.500 s idle: cudaMalloc",
        "0.500 s idle: Python before cudaLaunchKernel",
        "0.400 s idle: aten::mm",
        "0.100 s idle: cudaLaunchKernel",
    ]
    assert lines[between:update] == [
        "log_prob to update: 1.000 s, busy 0.000, NCCL alone 0.000, idle 1.000",
        "1.000 s idle: Python before cudaLaunchKernel",
    ]
    assert lines[update:] == [
        "update: 4.000 s, busy 1.500, NCCL alone 0.000, idle 2.500",
        "1.500 s 2 x gemm",
        "1.000 s idle: Python before cudaLaunchKernel",
        "1.000 s idle: cudaLaunchKernel",
        "0.500 s idle: Python at the end",
    ]

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs every ``*interpreter_cases.py`` under Triton's interpreter, in a separate process: the import chooses it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow import slow

CASES = sorted(Path(__file__).parent.glob("*interpreter_cases.py"))
SECONDS = 900


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("which", "at_least"), [(["--tests=quick"], 200), slow(["--tests=no-e2e", "-m", "slow"], 10)], ids=["quick", "slow"]
)
def test_triton_kernels_under_the_interpreter(which, at_least):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which, *map(str, CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS - 20,
        check=False,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert passed and int(passed.group(1)) >= at_least, result.stdout[-5000:]

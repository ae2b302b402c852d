# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a file of cases under Triton's interpreter, in a process of its own: Triton chooses it when it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

SECONDS = 600
"""What a test that calls :func:`run_interpreted` needs as its ``timeout``."""


def run_interpreted(cases: Path, at_least: int) -> None:
    """Every test of ``cases`` passes, and there are ``at_least`` as many of them."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS - 20,
        check=False,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert passed and int(passed.group(1)) >= at_least, result.stdout[-5000:]

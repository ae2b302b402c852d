# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
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

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/on_gpu.sh runs each of its parts: what it lists is what it has, in the same order."""

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/on_gpu.sh"


def test_every_part_can_be_chosen_and_is_run_without_a_choice():
    text = SCRIPT.read_text()
    listed = re.search(r"^parts=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)[1].split()
    assert listed == re.findall(r"^part \d+ (\w+) ", text, re.MULTILINE)


def test_the_sanitizer_sees_every_file_that_has_small_calls_for_it():
    listed = re.search(r"^sanitizer\(\) \{.*?^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[0]
    tests = SCRIPT.parents[1] / "tests/kernels"
    files = {
        f.name for f in tests.glob("*_on_gpu.py") if re.search(r"^def test_\w*sanitizer", f.read_text(), re.MULTILINE)
    }
    assert len(files) > 3 and set(re.findall(r"tests/kernels/(\w+\.py)", listed)) == files


def test_a_part_that_does_not_exist_is_named(tmp_path):
    ran = subprocess.run(["bash", SCRIPT, tmp_path / "out", "nothing"], capture_output=True, text=True)
    assert ran.returncode == 2 and "nothing is not a part; choose from: operations" in ran.stderr

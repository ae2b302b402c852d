# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs ``fused_interpreter_cases.py`` under Triton's interpreter, in a process of its own."""

from pathlib import Path

import interpreter
import pytest


@pytest.mark.timeout(interpreter.SECONDS)
def test_operations_that_quantize_under_the_interpreter():
    interpreter.run_interpreted(Path(__file__).with_name("fused_interpreter_cases.py"), at_least=48)

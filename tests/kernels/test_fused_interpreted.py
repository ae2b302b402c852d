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
"""Runs ``fused_interpreter_cases.py`` under Triton's interpreter, in a process of its own."""

from pathlib import Path

import interpreter
import pytest


@pytest.mark.timeout(interpreter.SECONDS)
def test_operations_that_quantise_under_the_interpreter():
    interpreter.run_interpreted(Path(__file__).with_name("fused_interpreter_cases.py"), at_least=33)

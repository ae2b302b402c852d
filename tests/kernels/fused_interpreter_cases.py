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
"""The operations that quantise their result, and the guards of all quantisers, under Triton's interpreter. Run by
``test_fused_interpreted.py`` in its own process, because ``TRITON_INTERPRET`` is read when Triton is imported."""

import pytest
from contract_inputs import gaussian
from fused_checks import CHECKS, INPUTS, canaries, check_norm
from quantiser_checks import check_all_quantisers

from jetrl_verl.kernels import triton_kernels
from jetrl_verl.numerics import SCALE_RULES


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("check", CHECKS)
def test_operations_that_quantise_their_result(monkeypatch, check, case, rule):
    with canaries(monkeypatch):
        check(case, 3, 384, rule, "cpu")


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not check_norm])
def test_operations_that_quantise_more_than_a_tile_of_rows(monkeypatch, check):
    with canaries(monkeypatch):
        check(gaussian, 130, 128, "fp32", "cpu")


@pytest.mark.parametrize("check", CHECKS)
def test_operations_that_quantise_an_empty_result(check):
    check(gaussian, 0, 256, "fp32", "cpu")


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("shape", [(3, 130), (131, 4)])
def test_quantisers_write_their_outputs_and_nothing_else(monkeypatch, shape, rule):
    with canaries(monkeypatch):
        check_all_quantisers(triton_kernels, gaussian(*shape), rule, "cpu")

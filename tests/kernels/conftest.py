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
"""The inputs of these tests are the contract's own: ``tests/numerics/contract_inputs.py``."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
sys.path.append(str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def native_library() -> None:
    """The native kernels: skips another GPU than theirs, fails where they are not built."""
    from jetrl_verl.kernels import native

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the native kernels are for Hopper GPUs")
    if native.unavailable() is not None:
        pytest.fail(native.unavailable())

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
"""The INT8 kernels under Triton's interpreter, on the CPU; ``test_int8_kernels_on_cpu.py`` starts the process."""

import pytest
import torch
from contract_inputs import CASES, gaussian, heavy_tailed
from quantiser_checks import assert_same_bytes

from jetrl_verl import numerics
from jetrl_verl.kernels import triton_kernels


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (17, 256), (2, 9000)])
def test_the_quantiser_has_the_bytes_of_numerics(case, shape):
    x = case(*shape)
    assert_same_bytes(triton_kernels.quantize_int8(x), numerics.quantize_int8(x))


def test_leading_dimensions_strides_and_empty_batches():
    x = gaussian(256, 6).t().reshape(2, 3, 256)
    assert_same_bytes(triton_kernels.quantize_int8(x), numerics.quantize_int8(x))
    assert_same_bytes(triton_kernels.quantize_int8(x[:0]), numerics.quantize_int8(x[:0]))


@pytest.mark.parametrize("shape", [(65, 130, 300), (1, 256, 256), (130, 66, 128), (3, 5, 0), (0, 128, 128)])
def test_gemm_is_the_reference(shape):
    """In every bit without a bias; the interpreter rounds a fused multiply-add twice, and it truncates to BF16."""
    m, n, k = shape
    a, b = numerics.quantize_int8(heavy_tailed(m, k)), numerics.quantize_int8(gaussian(n, k))
    bias = gaussian(n, 2)[:, 1]
    plain = triton_kernels.gemm_int8(a, b, out_dtype=torch.float32)
    assert torch.equal(plain, numerics.gemm_int8(a, b, out_dtype=torch.float32))
    biased = triton_kernels.gemm_int8(a, b, bias=bias, out_dtype=torch.float32)
    want = numerics.gemm_int8(a, b, bias=bias, out_dtype=torch.float32)
    assert (biased - want).norm() <= 1e-6 * want.norm()
    assert triton_kernels.gemm_int8(a, b).dtype == torch.bfloat16

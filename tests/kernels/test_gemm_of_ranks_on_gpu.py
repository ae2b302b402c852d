# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The product of row-parallel layers on a GPU: every backend has the bits of the ranks' products, added in order."""

import pytest
import torch
from backends import Backend
from contract_inputs import gaussian
from test_gemm_on_gpu import bits, operands

from jetrl_verl import kernels
from jetrl_verl.kernels import dispatch
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.kernels.gemm_nt_of_ranks import sliced_gemm_nt_of_ranks, triton_gemm_nt_of_ranks
from jetrl_verl.kernels.native import Plan
from jetrl_verl.reference import QuantizedTensor, k_slices

pytestmark = pytest.mark.timeout(120, method="thread")

ROWS = (1, 63, 64, 65, 129, 1000, 4096)


def of_ranks(a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias=None) -> torch.Tensor:
    """What the ranks compute, each with a slice of its own in memory, and add."""

    def held(q: QuantizedTensor) -> QuantizedTensor:
        return QuantizedTensor(q.qdata.contiguous(), q.scales.t().contiguous().t())

    parts = []
    for rank, (x, w) in enumerate(zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)):
        added = None if rank else bias
        parts.append(kernels.fprop_quantized(held(x), held(w).qdata, held(w).scales.contiguous(), added))
    return kernels.sum_of_ranks(parts)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("nk", [(4096, 4096), (4096, 12288), (5120, 27648), (8192, 29696), (72, 1024)])
def test_the_backends_have_the_bits_of_the_ranks(nk, ranks, with_bias):
    """o and down of 8B, down of 32B and 72B (padded to divide), a narrow one; M across the decode kernel's end."""
    n, k = nk
    if k % (128 * ranks):
        pytest.skip("slices are no multiples of 128")
    a, b = operands(max(ROWS), n, k, True)
    bias = gaussian(1, n)[0].cuda() if with_bias else None
    for m in ROWS:
        part = QuantizedTensor(a.qdata[:m], a.scales[:m].t().contiguous().t())
        want = of_ranks(part, b, ranks, bias)
        assert torch.equal(bits(kernels.gemm_nt_of_ranks(part, b, ranks, bias)), bits(want)), f"M={m}"
        for name in kernels.BACKENDS["gemm_nt_of_ranks"][kernels.platform_of(a.qdata.device)]:
            if dispatch.supports("gemm_nt_of_ranks", name, part, b, ranks, bias):
                got = Backend(name).gemm_nt_of_ranks(part, b, ranks, bias)
                assert torch.equal(bits(got), bits(want)), f"{name} M={m}"


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_every_triton_tile_has_the_same_bits(tile, ranks):
    a, b = operands(1000, 384, 3072, True)
    got = triton_gemm_nt_of_ranks(a, b, ranks, tile=TILES[tile])
    assert torch.equal(bits(got), bits(of_ranks(a, b, ranks)))


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "plan", [Plan(block=block, cluster=cluster) for block in (64, 128) for cluster in (1, 2)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_native_plan_has_the_same_bits(plan, ranks):
    """Slices of 3 blocks and more: they end at every stage of the ring."""
    from jetrl_verl.kernels.gemm_nt_of_ranks import native_gemm_nt_of_ranks

    a, b = operands(1000, 712, 3072, True)
    got = native_gemm_nt_of_ranks(a, b, ranks, plan=plan)
    assert torch.equal(bits(got), bits(sliced_gemm_nt_of_ranks(a, b, ranks)))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The product of row-parallel layers on a GPU: every backend has the bits of the ranks' products, added in order."""

import model_like
import pytest
import torch
from backends import Backend, triton_kernels
from contract_inputs import gaussian
from test_gemm_on_gpu import bits, operands, relative_error

from jetrl_verl import kernels, reference
from jetrl_verl.kernels.gemm_nt import TILES
from jetrl_verl.kernels.gemm_nt_of_ranks import native_gemm_nt_of_ranks, sliced_gemm_nt_of_ranks
from jetrl_verl.kernels.native import Plan
from jetrl_verl.kernels.sum_of_ranks import products_of_ranks
from jetrl_verl.reference import GemmCall, QuantizedTensor, k_slices

pytestmark = pytest.mark.timeout(240, method="thread")

RANKS = (2, 4, 8)
SHAPES = {
    "8B o": (4096, 4096),
    "8B down": (4096, 12288),
    "32B o": (5120, 5120),
    "32B down": (5120, 27648),
    "72B o": (8192, 8192),
    "72B down, padded to divide": (8192, 29696),
    "narrow": (72, 1024),
}
"""[N, K]; every slice of K over 2, 4 and 8 ranks is a multiple of 128."""


def rows_at_switches(n: int) -> list[int]:
    """Numbers of rows around each threshold of the all-reduce of [M, n] in BF16, stock or the plugin's, and of the
    decode kernel; one row, and a long micro-batch."""
    from vllm.distributed.device_communicators import all_reduce_utils as limits

    from jetrl_verl.rollout.row_parallel import GATHERED_BYTES

    # The custom kernel goes from one stage to two at 512 KiB with 4 ranks and 256 KiB with 8, and ends at 8 MiB.
    sizes = {2**18, 2**19, 2**23, GATHERED_BYTES}
    for table in (limits.CUSTOM_ALL_REDUCE_MAX_SIZES, limits.SYMM_MEM_ALL_REDUCE_MAX_SIZES):
        sizes |= {size for ranks, size in table["9.0"].items() if ranks in RANKS}
    around = {size // (2 * n) + more for size in sizes for more in (-1, 0, 1)}
    return sorted({1, 127, 128, 129, 16384} | {m for m in around if 0 < m <= 16384})


def test_all_reduce_thresholds_match_the_published_example():
    assert {63, 64, 65, 1023, 1024, 4095, 4096, 8192, 16384} <= set(rows_at_switches(4096))


def of_ranks(a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias=None) -> torch.Tensor:
    """The sum of the ranks' products, each with its own slice in memory."""

    def copied(q: QuantizedTensor) -> QuantizedTensor:
        return QuantizedTensor(q.qdata.contiguous(), q.scales.t().contiguous().t())

    parts = []
    for rank, (x, w) in enumerate(zip(k_slices(a, ranks), k_slices(b, ranks), strict=True)):
        added = None if rank else bias
        parts.append(kernels.fprop_quantized(copied(x), copied(w).qdata, copied(w).scales.contiguous(), added))
    return kernels.sum_of_ranks(parts)


def backends_of(a: QuantizedTensor, b: QuantizedTensor, ranks: int, bias=None) -> list[str]:
    """Backends of this GPU that support the call."""
    names = kernels.OPERATIONS["gemm_nt_of_ranks"].backends[kernels.platform_of(a.qdata.device)]
    return [name for name in names if Backend(name).supports("gemm_nt_of_ranks", a, b, ranks, bias)]


@pytest.mark.parametrize("nk", SHAPES.values(), ids=SHAPES)
def test_backends_match_the_ranks_in_every_batch(nk):
    """The products of a rollout's ranks, added in order, equal the trainer's at every number of rows, and a row has the
    same bits in every batch."""
    n, k = nk
    a = kernels.quantize_1x128(model_like.activations(16384, k, torch.device("cuda")), "fp32")
    b = kernels.quantize_128x128(model_like.weights(n, k, torch.device("cuda")), "fp32")
    for ranks in RANKS:
        whole = kernels.gemm_nt_of_ranks(a, b, ranks)
        close = reference.gemm_nt_of_ranks(QuantizedTensor(a.qdata[:64], a.scales[:64]), b, ranks)
        assert relative_error(whole[:64], close.double()) < 2.5e-3
        for m in rows_at_switches(n):
            part = QuantizedTensor(a.qdata[:m], a.scales[:m].t().contiguous().t())
            assert torch.equal(bits(of_ranks(part, b, ranks)), bits(whole[:m])), f"{ranks} ranks, M={m}"
            for name in backends_of(part, b, ranks):
                got = Backend(name).gemm_nt_of_ranks(part, b, ranks)
                assert torch.equal(bits(got), bits(whole[:m])), f"{name}, {ranks} ranks, M={m}"


@pytest.mark.parametrize("ranks", RANKS)
def test_a_bias_is_added_to_the_first_ranks_product(ranks):
    a, b = operands(1000, 384, 3072, "gemm_nt")
    bias = gaussian(1, 384)[0].cuda()
    want = of_ranks(a, b, ranks, bias)
    assert not torch.equal(bits(want), bits(of_ranks(a, b, ranks)))
    assert torch.equal(bits(kernels.gemm_nt_of_ranks(a, b, ranks, bias)), bits(want))
    for name in backends_of(a, b, ranks, bias):
        assert torch.equal(bits(Backend(name).gemm_nt_of_ranks(a, b, ranks, bias)), bits(want)), name


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_are_added_as_in_the_reference(ranks):
    """Sums that round differently in any other order, and random ones of all sizes."""
    device = torch.device("cuda")
    cases = products_of_ranks(device, ranks)
    for m in rows_at_switches(4096):
        cases.append([model_like.activations(m, 4096, device) for _ in range(ranks)])
    for parts in cases:
        want = reference.sum_of_ranks(parts)
        assert torch.equal(bits(kernels.sum_of_ranks(parts)), bits(want)), parts[0].shape
        if len(want) <= 160:
            assert torch.equal(bits(want.cpu()), bits(reference.sum_of_ranks([part.cpu() for part in parts])))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_every_triton_tile_has_the_same_bits(tile, ranks):
    a, b = operands(1000, 384, 3072, "gemm_nt")
    got = triton_kernels.gemm_nt_of_ranks(a, b, ranks, tile=TILES[tile])
    assert torch.equal(bits(got), bits(of_ranks(a, b, ranks)))


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "plan", [Plan(block=block, cluster=cluster) for block in (64, 128) for cluster in (1, 2)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_native_plan_has_the_same_bits(plan, ranks):
    """Slices of 3 blocks and more: they end at every stage of the ring."""
    a, b = operands(1000, 712, 3072, "gemm_nt")
    call = GemmCall.over_ranks(a, b, ranks)
    got = native_gemm_nt_of_ranks(call, plan=plan)
    assert torch.equal(bits(got), bits(sliced_gemm_nt_of_ranks(call)))

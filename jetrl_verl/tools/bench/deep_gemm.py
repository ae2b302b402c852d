# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM as the vLLM wheel brings it: forward GEMM, weight-gradient GEMM, and their compilation ahead of time.

``fp8_gemm_nt`` has two kernels on Hopper, chosen by the granularity of B's scales: 1D2D (128x128 blocks, BF16 out) for
FProp and DGrad, 1D1D (1x128 groups) for WGrad, which only ever *adds* to an FP32 matrix: an overwritten gradient is
zeroed first, and that is timed with it.

A kernel is compiled by nvcc for every N, K and tile at its first use, for seconds to a minute, and kept in a folder
(``DG_JIT_CACHE_DIR``). That folder is shared between processes and a finished kernel is moved into it in one step, so a
pool of processes fills it: each calls one shape, and this process then loads what they made.
"""

import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from jetrl_verl.reference import BLOCK, FP8_DTYPE, QuantizedTensor
from jetrl_verl.tools.bench.shapes import Problem

MOST_PROCESSES = 12
"""Each holds a CUDA context, vLLM's modules and one nvcc."""


def align_scales(q: QuantizedTensor) -> QuantizedTensor:
    """1x128 scales [M, K/128] as its TMA reads them: column-major, columns on 16 bytes. Ours are, where M is a multiple
    of 4; any others DeepGEMM would bring there by a kernel of its own in every call."""
    from vllm.utils.deep_gemm import get_col_major_tma_aligned_tensor

    return QuantizedTensor(q.qdata, get_col_major_tma_aligned_tensor(q.scales))


def gemm_nt(a: QuantizedTensor, b: QuantizedTensor, out: torch.Tensor, *, b_block_scaled: bool) -> torch.Tensor:
    """``A B^T``: into a BF16 ``out`` where B has block scales, added to an FP32 ``out`` where it has groups."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    recipe = (1, BLOCK, BLOCK) if b_block_scaled else (1, 1, BLOCK)
    added = None if b_block_scaled else out
    # Without the last argument vLLM's wrapper may replace FP32 scales by powers of two.
    fp8_gemm_nt((a.qdata, a.scales), (b.qdata, b.scales), out, c=added, recipe=recipe, is_deep_gemm_e8m0_used=False)
    return out


def supports(problem: Problem) -> bool:
    """Whether one of its kernels computes this."""
    return problem.b_block_scaled or problem.out != "bf16"


def _compile_one(job: tuple[int, int, int, bool]) -> None:
    """In a process of the pool: call one shape, which leaves its kernel in the folder."""
    m, n, k, b_block_scaled = job
    blocks = -(-k // BLOCK)

    def qdata(rows: int) -> torch.Tensor:
        return torch.zeros(rows, k, dtype=torch.uint8, device="cuda").view(FP8_DTYPE)

    def in_groups(rows: int) -> QuantizedTensor:
        return align_scales(QuantizedTensor(qdata(rows), torch.ones(blocks, rows, device="cuda").t()))

    # Whether block scales are row-major is a parameter of the kernel; ours are.
    in_blocks = QuantizedTensor(qdata(n), torch.ones(-(-n // BLOCK), blocks, device="cuda"))
    out = torch.zeros(m, n, dtype=torch.bfloat16 if b_block_scaled else torch.float32, device="cuda")
    gemm_nt(in_groups(m), in_blocks if b_block_scaled else in_groups(n), out, b_block_scaled=b_block_scaled)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def jobs_of(problems: Iterable[Problem]) -> list[tuple[int, int, int, bool]]:
    """Shapes to compile, once each; layers alternate, so that neighbours in the pool do not make the same kernel."""
    jobs = {(p.m, p.n, p.k, p.b_block_scaled) for p in problems if supports(p)}
    return sorted(jobs)


def compile_all(problems: Iterable[Problem]) -> float:
    """Compile every kernel that ``problems`` need; seconds that it took.

    Raises what the first process raised if no shape compiles; one that alone does not will raise where it is timed.
    """
    begin, jobs = time.monotonic(), jobs_of(problems)
    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1, len(jobs)))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        errors = [made.exception() for made in [pool.submit(_compile_one, job) for job in jobs]]
    if jobs and all(errors):
        raise errors[0]
    return time.monotonic() - begin

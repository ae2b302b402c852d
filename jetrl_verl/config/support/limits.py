# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of the table: releases, GPUs, and the price of missing kernels."""

from jetrl_verl.patches.patch import VERSIONS

RELEASES = {**VERSIONS, "torch": ("2.11", "2.13"), "transformers": ("5.9", "5.10")}
"""Supported releases; a shorter one leaves the rest of the version free."""

PINS = {package: " or ".join(releases) for package, releases in RELEASES.items()}
"""The same in words."""

CUTS_AT_PAGES = "0.24"
"""Release of vLLM that cuts a hybrid's cached prompts at the ends of pages alone."""

MIN_CAPABILITY = (8, 9)
"""First CUDA compute capability whose tensor cores multiply E4M3."""

SHARED_CAPABILITY = (9, 0)
"""Compute capability of the shared operations: FlashAttention 3 has no other."""

WGRAD_IN_TRITON = 0.68
"""Speed of WGrad in Triton over cuBLAS's in BF16, FP32 stored, four linears of Qwen3-8B at 4,096 and 16,384 tokens on
an H200: 0.681 (BF16 stored 0.692) (benchmarks/results/gemm_h200.json of commit 457e905)."""

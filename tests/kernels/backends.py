# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One backend's implementations by the names of their operations, for tests that compare backends."""

from collections.abc import Callable

from jetrl_verl.kernels import dispatch


class Backend:
    """``Backend("triton").quantize_1x128``; ``gemm_nt`` is the implementation of both kinds of scales."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> Callable:
        operation = "gemm_nt_128x128" if operation == "gemm_nt" else operation
        if operation not in dispatch.OPERATIONS:
            raise AttributeError(operation)
        return dispatch.implementation(operation, self.name)

    def supports_gemm_nt(self, a, b, **call) -> bool:
        return dispatch.supports("gemm_nt_128x128", self.name, a, b, **call)


triton_kernels = Backend("triton")

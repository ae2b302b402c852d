# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One backend's implementations by the names of their operations, for tests that compare backends."""

from collections.abc import Callable

from jetrl_verl.kernels import dispatch
from jetrl_verl.reference import GemmCall

CALLS = {"gemm_nt": GemmCall.by_weight, "wgrad": GemmCall.by_tokens, "gemm_nt_of_ranks": GemmCall.over_ranks}
"""GEMM -> its call from the operator's arguments."""


class Backend:
    """``Backend("triton").quantize_1x128``; GEMMs have the operator's arguments, and ``tile``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> Callable:
        if operation not in dispatch.OPERATIONS:
            raise AttributeError(operation)
        run = dispatch.implementation(operation, self.name)
        if operation not in CALLS:
            return run

        def product(*operands, tile=None, **arguments):
            return run(CALLS[operation](*operands, **arguments), **({"tile": tile} if tile else {}))

        return product

    def supports(self, gemm: str, *operands, **arguments) -> bool:
        return dispatch.supports(gemm, self.name, CALLS[gemm](*operands, **arguments))


triton_kernels = Backend("triton")

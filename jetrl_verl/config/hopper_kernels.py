# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The warning of a run on Hopper without the native kernels, which a package installed without nvcc lacks; the results
have the same bits.
"""

from collections.abc import Sequence
from pathlib import Path

from jetrl_verl.formats.catalog import UNQUANTIZED, traits_of

from .options import JetConfig
from .support.limits import WGRAD_IN_TRITON

CAPABILITY = (9, 0)
"""The GPUs that the kernels are for."""

IN_TRITON = (
    f"WGrad runs in Triton at {WGRAD_IN_TRITON} of BF16's speed, and all products of a mixture's experts run there"
)
"""The price for FP8 training."""

CHOSEN_BACKWARD = (
    "jetrl.backward=auto is bf16, since the package lacks the Hopper kernels and WGrad in Triton has "
    f"{WGRAD_IN_TRITON} of BF16's speed; log-probabilities keep their bits. Install a wheel that has the kernels "
    "(`make wheel`), or set jetrl.backward=fp8."
)
"""What the driver says where it chooses a BF16 backward."""


def in_this_package() -> bool:
    """Whether the driver's package has the kernels."""
    return (Path(__file__).parents[1] / "kernels" / "libjetrl_sm90.so").is_file()


def price(options: JetConfig) -> str:
    """What a job pays without the kernels; empty for one that calls none of them."""
    if not any(traits and traits.native for traits in map(traits_of, (options.train, options.rollout))):
        return ""
    if UNQUANTIZED not in (options.train, options.backward):
        return IN_TRITON
    return "FP8 linears of up to 128 rows run in vLLM's CUTLASS kernel, slower than ours"


def missing(options: JetConfig, nodes: Sequence[str]) -> str:
    """The line that the driver prints where Hopper ``nodes`` lack the kernels; empty where the job pays nothing."""
    paid = price(options)
    if not paid or not nodes:
        return ""
    remedy = "install there a wheel that has them (`make wheel` where there is an nvcc)"
    if paid == IN_TRITON:
        remedy += ", or set jetrl.backward=bf16 (of a dense model)"
    return (
        f"jetrl_verl: warning: the Hopper kernels are not in the package on {', '.join(nodes)}: {paid}. To be faster, "
        f"{remedy}. The results have the same bits."
    )

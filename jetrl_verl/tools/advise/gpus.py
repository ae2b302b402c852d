# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The GPUs for which there are predictions.

Rates are an H200's. An H100 has its multiprocessors, clocks and NVLinks, and another memory: a smaller one, and slower.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: as its maker has it, the begin of what CUDA says. memory: bytes.
        bandwidth: rate with the bytes a second that its memory reads and writes.
    """

    name: str
    memory: float
    bandwidth: str


MEASURED = "h200"
"""Whose rates ``rates.json`` has."""

GPUS = {
    MEASURED: Gpu("NVIDIA H200", 139.8 * 2**30, "bandwidth"),
    "h100": Gpu("NVIDIA H100 80GB", 79.1 * 2**30, "h100.bandwidth"),
}

BY_BYTES = ("bandwidth", "cache", "cache.fp8", "optimizer")
"""Rates in bytes a second of the GPU's memory."""


def key_of(name: str) -> str:
    """Of ``GPUS``, by what CUDA calls a GPU.

    Raises:
        KeyError: another GPU.
    """
    for key, gpu in GPUS.items():
        if name.startswith(gpu.name):
            return key
    raise KeyError(name)

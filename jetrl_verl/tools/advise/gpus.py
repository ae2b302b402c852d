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
        name: what CUDA calls it. memory: bytes that CUDA shows of it.
        bandwidth: rate with the bytes a second that its memory reads and writes.
        between: rate with how many times as long as on an H200 what lies between a trainer's GEMMs takes.
    """

    name: str
    memory: float
    bandwidth: str = "bandwidth"
    between: str = ""


MEASURED = "h200"
"""Whose rates ``rates.json`` has."""

GPUS = {
    MEASURED: Gpu("NVIDIA H200", 139.8 * 2**30),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.1 * 2**30, "h100.bandwidth", "h100.between"),
}

BY_BYTES = ("bandwidth", "cache", "cache.fp8", "optimizer")
"""Rates in bytes a second of the GPU's memory."""

SECONDS_BETWEEN = ("prefill.layer",)
TIMES_BYTES = tuple(f"between.{of}.{way}" for of in ("stock", "liger", "shared") for way in ("forward", "backward"))
"""Rates of what lies between GEMMs: seconds, and times the seconds of bytes by ``bandwidth``."""

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU under test: its timer, the bandwidth measured on it in this run, and the facts that go with every figure."""

from dataclasses import dataclass

import torch

from jetrl_verl.kernels import describe_backends
from jetrl_verl.tools.bench import BenchError
from jetrl_verl.tools.bench.timing import CudaClock, Timer, copy_bandwidth
from jetrl_verl.tools.provenance import provenance, version_of


@dataclass(frozen=True)
class Machine:
    """Attributes:
    device: where operands live. timer: of that device. bandwidth: bytes per second of a copy, read plus written.
    event_us: what two events with nothing between them measure, which is part of every single run.
    """

    device: torch.device
    timer: Timer
    bandwidth: float
    event_us: float

    def facts(self) -> dict:
        """Build, device, versions and what was measured of the device, for the JSON."""
        return {
            "build": provenance(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "versions": {name: version_of(name) for name in ("torch", "triton", "vllm", "torchao", "jetrl-verl")},
            "backends": describe_backends(self.device),
            "repeats": self.timer.repeats,
            "copy_bandwidth": self.bandwidth,
            "event_us": self.event_us,
        }

    def clear(self) -> None:
        """Give memory back between two shapes."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def clock_and_power(self) -> dict | None:
        """MHz and watts of this moment; None without NVIDIA's management library or its Python package."""
        try:
            return {"mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1000}
        except (ModuleNotFoundError, RuntimeError, AssertionError):
            return None


def this_machine(repeats: int) -> Machine:
    """The current GPU, seeded and with its bandwidth measured.

    Raises:
        BenchError: no NVIDIA GPU with FP8 matrix instructions.
    """
    if not torch.cuda.is_available():
        raise BenchError("jetrl bench needs an NVIDIA GPU and torch finds none; run it on a machine that has one.")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        describe_backends(device)
    except RuntimeError as error:
        raise BenchError(str(error)) from None
    torch.manual_seed(0)
    timer = Timer(CudaClock(), repeats, torch.cuda.get_device_properties(device).L2_cache_size)
    nothing = timer.interleaved({"nothing": [lambda: None]}, graphs=False)["nothing"].median
    return Machine(device, timer, copy_bandwidth(timer, device), nothing)

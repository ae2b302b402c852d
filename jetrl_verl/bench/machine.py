# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The GPU under test: its timer, the bandwidth measured on it in this run, and the facts that go with every figure."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from jetrl_verl.bench import BenchError
from jetrl_verl.bench.timing import CudaClock, Timer, copy_bandwidth
from jetrl_verl.kernels import describe_backends


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
        """Device, clock, power and versions, for the JSON."""
        return {
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "versions": {name: _version(name) for name in ("torch", "triton", "vllm", "torchao", "jetrl-verl")},
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
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

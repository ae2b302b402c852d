# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Real verl on a machine without a GPU: the ``cpu`` platform, opt-in through ``VERL_PLATFORM=cpu``.

verl 0.9.1 has a platform registry and no CPU entry. With this one the v1 trainer, Ray, FSDP2 on gloo and vLLM's CPU
build run unchanged; the demo and the end-to-end tests use it. Without the variable nothing here is imported: the head
node of a GPU cluster stays ``nvidia``.

* the process group: patches/process_group_on_cpu.py; FSDP: patches/fsdp_on_cpu.py;
* FSDP engines are registered for ``cuda`` and ``npu``; ``VERL_ENGINE_DEVICE=cuda`` selects them;
* verl asks Ray for the resource ``GPU``; a run declares it through ``ray_kwargs.ray_init.num_gpus``;
* vLLM's CPU build: patches/reloadable_weights_on_cpu.py and patches/fork_on_cpu.py;
* calls that torch has for accelerators only (memory statistics, IPC) return neutral values.
"""

import os
import types
from typing import Any

import torch


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the accelerator-only calls that verl makes answered neutrally (0 bytes, no-op)."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached by torch on the CPU."""

    @staticmethod
    def ipc_collect() -> None:
        """There is no IPC memory to collect."""

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """0: the CPU allocator keeps no such figure."""
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of host memory."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Name used in verl's FLOPS table."""
        return "cpu"

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Global CPU generator state."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Set the global CPU generator state."""
        torch.set_rng_state(state)


def _build_platform_class() -> type:
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    device_module = _CpuDeviceModule()

    class PlatformCPU(PlatformCUDA):
        """verl's platform of NVIDIA GPUs, whose resource in Ray it has, for the host processor."""

        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: device_module)

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> str:
            # verl uses it as the argument of Tensor.to and device_mesh: an index would name a GPU.
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def is_ipc_supported(self) -> bool:
            return False

    return PlatformCPU


def _let_fsdp1_broadcast_from_the_cpu() -> None:
    """FSDP1 refuses to broadcast rank 0's parameters from a CPU, since NCCL cannot; gloo can."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def install() -> None:
    """Register the platform and apply its patches; called once from the plugin when the variable is set."""
    from verl.plugin.platform import PlatformRegistry

    PlatformRegistry.register(platform="cpu")(_build_platform_class())
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    os.environ.setdefault("VERL_ENGINE_VENDOR", "nvidia")

    from jetrl_verl.patches import fsdp_on_cpu, process_group_on_cpu
    from jetrl_verl.patches.after_import import when_imported

    process_group_on_cpu.PROCESS_GROUP.apply()
    for patch in fsdp_on_cpu.PATCHES:
        when_imported(patch.module, f"jetrl: {patch.function}", patch.apply)
    when_imported("torch.distributed.fsdp._init_utils", "jetrl: FSDP1", _let_fsdp1_broadcast_from_the_cpu)

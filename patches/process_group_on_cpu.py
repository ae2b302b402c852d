# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A process group on the CPU platform (jetrl_verl/cpu_platform.py).

verl 0.9.1 asks torch for the backend ``cpu:gloo,<device>:<backend>``, which on the CPU platform names one device twice.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch


def initialize_global_process_group_ray(stock, timeout_second: Any = None, backend: str | None = None) -> None:
    from verl.utils.device import get_device_name

    if backend is None and get_device_name() == "cpu":
        backend = "gloo"
    return stock(timeout_second=timeout_second, backend=backend)


PROCESS_GROUP = Patch(
    replaces="verl.utils.distributed:initialize_global_process_group_ray",
    sha256={"0.9.1": "29630037907e0c49499730b684d3edf9d66a65045df10bf1588623690f6c69ae"},
    by=initialize_global_process_group_ray,
    symptom="torch refuses the process group of a worker on the CPU",
    upstream="verl has no CPU platform; no issue asks for one",
    until="verl ships a CPU platform of its own",
    needed=True,
)
PATCHES = (PROCESS_GROUP,)

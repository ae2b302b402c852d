# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP on the CPU platform (jetrl_verl/cpu_platform.py), where parameters are in host memory from the start.

verl 0.9.1 offloads a forward-only FSDP2 model to pinned host memory, which needs a GPU driver, and loads an FSDP1 model
to the device ``cpu:cpu``, which does not exist. On a CPU there is nothing to offload or to load.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch


def apply_fsdp2(stock, model: Any, fsdp_kwargs: dict[str, Any], config: Any) -> None:
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu":
        fsdp_kwargs = {**fsdp_kwargs, "offload_policy": None}
    return stock(model, fsdp_kwargs, config)


def load_fsdp_model_to_gpu(stock, model: Any) -> None:
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        stock(model)


NO_PINNED_MEMORY = Patch(
    replaces="verl.utils.fsdp_utils:apply_fsdp2",
    sha256={"0.9.1": "543167296822eecd41afacc043e98cbb83017d015c3c669e55ce13834a1bc857"},
    by=apply_fsdp2,
    symptom="a reference policy under FSDP2 cannot be built without a GPU driver",
    upstream="verl has no CPU platform; no issue asks for one",
    until="verl ships a CPU platform of its own",
    needed=True,
)
NOTHING_TO_LOAD = Patch(
    replaces="verl.utils.fsdp_utils:load_fsdp_model_to_gpu",
    sha256={"0.9.1": "edb01926e36c0ca18a6995c531cf2d4546b4091f8e3651cdb62ead51af153359"},
    by=load_fsdp_model_to_gpu,
    symptom="the first weight sync under FSDP1 ends at the device string cpu:cpu",
    upstream="verl has no CPU platform; no issue asks for one",
    until="verl ships a CPU platform of its own",
    needed=True,
)
PATCHES = (NO_PINNED_MEMORY, NOTHING_TO_LOAD)

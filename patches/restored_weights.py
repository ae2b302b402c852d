# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that decoupled PPO restores are those of the next forward.

verl 0.9.1's ``separate_async`` trainer computes old log-probabilities with the weights that it saved before the first
update. It copies them into the shards, past torch's version counters, and FSDP may have gathered weights of the pass
before: of the root module under FSDP1, of every layer under FSDP2 without ``reshard_after_forward``. These, and the
FP8 data of our layers, are now given up. Under FSDP2 what is saved of shards in host memory is now a copy.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch


def fsdp1_sharded_load_from_cpu(stock, model: Any, *args: Any) -> None:
    _give_up_gathered(model)
    stock(model, *args)


def fsdp2_sharded_load_from_cpu(stock, model: Any, *args: Any) -> None:
    _give_up_gathered(model)
    stock(model, *args)


def fsdp2_sharded_save_to_cpu(stock, model: Any) -> Any:
    state, spec = stock(model)
    if next(model.parameters()).device.type == "cpu":  # of a CPU, or with param_offload
        state = {name: (tensor.clone(), of_tensor) for name, (tensor, of_tensor) in state.items()}
    return state, spec


def _give_up_gathered(model: Any) -> None:
    for module in model.modules():
        handle = getattr(module, "_handle", None)  # FSDP1's
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)
        elif hasattr(module, "reshard"):  # FSDP2's
            module.reshard()
        elif hasattr(module, "drop_qdata"):
            module.drop_qdata()


_WHY = dict(
    symptom="after a restore, passes compute with the gathered weights and FP8 data of the policy before it",
    upstream="the engine reshards after a forward pass where fsdp_size is above 1 alone; no issue is known",
    until="verl reshards before it restores weights, and tells its engine",
    needed=True,
)

FSDP1 = Patch(
    replaces="verl.utils.fsdp_utils:fsdp1_sharded_load_from_cpu",
    sha256={"0.9.1": "f8d8958cc4d366116bb794a3b15711fae3d7aa78231e04b0b52be7c300fea756"},
    by=fsdp1_sharded_load_from_cpu,
    **_WHY,
)
FSDP2 = Patch(
    replaces="verl.utils.fsdp_utils:fsdp2_sharded_load_from_cpu",
    sha256={"0.9.1": "6d5f31da6153b4f810ce589f360aa2977b04192223a1d3ea4540b49358bfc10a"},
    by=fsdp2_sharded_load_from_cpu,
    **_WHY,
)
SAVED = Patch(
    replaces="verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
    sha256={"0.9.1": "aee44a8cae9951efdf393c60db462af56182ea5ff07c973f74a5c2d21efa2051"},
    by=fsdp2_sharded_save_to_cpu,
    symptom="with param_offload the saved weights are the live ones, so a restore changes nothing",
    upstream="Tensor.cpu() of a tensor in host memory is that tensor; no issue is known",
    until="verl copies what it saves, as it does under FSDP1",
    needed=True,
)
PATCHES = (FSDP1, FSDP2, SAVED)

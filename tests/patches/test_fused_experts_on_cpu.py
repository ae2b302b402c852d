# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experts stay one tensor where the weight sync asks for that, and are verl's own pieces everywhere else."""

import torch
from patch_home import current, home

from jetrl_verl.patches.fused_experts import UNFUSE

EXPERTS = "model.layers.0.mlp.experts"


def weights() -> dict[str, torch.Tensor]:
    gate_up = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 6, 4)
    return {
        f"{EXPERTS}.gate_up_proj": gate_up,
        f"{EXPERTS}.down_proj": gate_up[:, :3].transpose(1, 2),
        "model.norm.weight": torch.ones(4),
    }


def test_experts_stay_whole_where_the_stream_is_made_for_our_receiver():
    kept_fused = home(UNFUSE).KEPT_FUSED
    token = kept_fused.set(True)
    try:
        stream = current(UNFUSE)(iter(weights().items()), "qwen3_moe")
    finally:
        kept_fused.reset(token)
    # Read after the switch is back, as the engine does.
    assert {name: tuple(tensor.shape) for name, tensor in stream} == {
        f"{EXPERTS}.gate_up_proj": (2, 6, 4),
        f"{EXPERTS}.down_proj": (2, 4, 3),
        "model.norm.weight": (4,),
    }


def test_without_the_switch_they_are_the_pieces_that_vllm_loads():
    home(UNFUSE)
    found = dict(current(UNFUSE)(iter(weights().items()), "qwen3_moe"))
    projections = ("gate_proj", "up_proj", "down_proj")
    expected = {f"{EXPERTS}.{expert}.{projection}.weight" for expert in range(2) for projection in projections}
    assert set(found) == expected | {"model.norm.weight"}
    gate_up = weights()[f"{EXPERTS}.gate_up_proj"]
    assert torch.equal(found[f"{EXPERTS}.1.up_proj.weight"], gate_up[1, 3:])


def test_the_engine_reaches_the_switch_and_the_function_by_verls_own_names():
    from verl.workers.engine.fsdp import transformer_impl, utils

    assert utils.KEPT_FUSED is home(UNFUSE).KEPT_FUSED
    assert transformer_impl.unfuse_moe_params is current(UNFUSE)

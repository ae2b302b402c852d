# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of a model with mRoPE whose sequences have one length, or that have one sequence.

torch packs tensors ``[4, T]`` of one ``T`` along their first dimension, ``[B * 4, T]``. verl 0.9.1 declares the last
dimension ragged, as it is where lengths differ, and ends in an error about shapes.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch

_ROWS = 4
"""Of position ids in verl: text, time, height, width."""


def pack_positions_by_tokens(stock, data: Any) -> None:
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    stock(data)
    positions = data.get("position_ids", None)
    if positions is None or not positions.is_nested or positions.dim() != 3:
        return
    values, sequences = positions.values(), positions.shape[0]
    if len(values) == _ROWS * sequences == int(positions.offsets()[-1]):
        data["position_ids"] = nested_tensor_from_tensor_list(list(values.unflatten(0, (sequences, _ROWS))))


EQUAL_LENGTHS = Patch(
    replaces="verl.utils.tensordict_utils:maybe_fix_3d_position_ids",
    sha256={"0.9.1": "780a4bcd5053439caf54828c1fde7794242a50510d57eceb126f7ffad6071f81"},
    by=pack_positions_by_tokens,
    symptom="a model with mRoPE stops with an error about shapes where all sequences of a rank have one length",
    upstream="verl has a workaround for lengths that differ; no issue is known",
    until="verl packs position ids along tokens",
    needed=False,
)
PATCHES = (EQUAL_LENGTHS,)

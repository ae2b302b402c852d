# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cut micro-batches out of a batch without visiting every sequence of the batch for each of them.

verl 0.9.1 does this on the host before each forward phase, and the GPUs wait. ``index_select_tensor_dict`` splits every
column of the batch into all its sequences, once per micro-batch. Columns of Python objects, which come from the dataset
and the agent loop, are selected as well, and ``forward_step`` copies each object as it moves tensors to the device.
verl's losses and engines read none of them except the inputs of images. Nor do they read what the driver computes
metrics and advantages from, and a pass without a loss reads no column of the losses. Cutting a column of jagged tensors
costs 0.3 ms of host time a micro-batch. Tensors that are read, their order and their number stay the same.
"""

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from jetrl_verl.patches.patch import Patch

_OBJECTS_OF_ENGINES = {"multi_modal_inputs"}
"""Columns with a Python object per sequence that verl's engines read."""

_OF_THE_DRIVER = {"rm_scores", "rollout_log_probs", "log_probs", "entropy", "token_level_rewards"}
"""Columns that neither verl's engines nor its losses read."""

_OF_LOSSES = {
    *("prompts", "responses", "response_mask", "old_log_probs", "ref_log_prob", "rollout_is_weights", "advantages"),
    *("returns", "values"),
}
"""Columns that verl's engines do not read."""


def index_select_tensor_dict(stock, batch: TensorDict | None, indices: torch.Tensor | list[int]) -> TensorDict | None:
    jagged = {} if batch is None else {name: column for name, column in batch.items() if _holds_sequences(column)}
    if not jagged:
        return stock(batch, indices)
    selected = stock(batch.exclude(*jagged), indices)
    rows = indices if isinstance(indices, list) else indices.tolist()
    for name, column in jagged.items():
        values, offsets = column.values(), column.offsets().tolist()
        bounds = list(zip(offsets, offsets[1:]))
        sequences = [values[slice(*bounds[row])] for row in rows]
        selected[name] = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    return selected.select(*batch.keys())


def _holds_sequences(column: Any) -> bool:
    """Whether ``column`` has a number per token, one sequence after the other."""
    nested = isinstance(column, torch.Tensor) and column.is_nested and column.layout == torch.jagged
    return nested and column.dim() == 2 and column.lengths() is None


def forward_backward_batch(stock, self: Any, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
    # A loss that is not verl's may read any column.
    loss = loss_function
    while hasattr(loss, "func"):  # of a partial
        loss = loss.func
    if loss is None or getattr(loss, "__globals__", {}).get("__name__", "").startswith("verl."):
        objects = {name for name, column in data.items() if isinstance(column, NonTensorStack)}
        unread = objects - _OBJECTS_OF_ENGINES | _OF_THE_DRIVER
        data = data.exclude(*unread, *(_OF_LOSSES if loss is None else ()))
    return stock(self, data, loss_function, forward_only=forward_only)


_UNTIL = "verl selects the columns of a phase and slices them once"

SELECT = Patch(
    replaces="verl.utils.tensordict_utils:index_select_tensor_dict",
    sha256={"0.9.1": "65808b4f84d61293f293fd6c9b7b79273d1d3e8b230bd858290b41970964e0e7"},
    by=index_select_tensor_dict,
    symptom="the GPUs wait while each micro-batch splits every column of the batch into all its sequences",
    upstream="columns are unbound once per call; no issue is known",
    until=_UNTIL,
    needed=False,
)
COLUMNS = Patch(
    replaces="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
    sha256={"0.9.1": "050c2c6078bc14f289612b6137cf241d89770389ec66fb2cbced293870b4ff53"},
    by=forward_backward_batch,
    symptom="the GPUs wait while each micro-batch copies columns that nothing reads",
    upstream="a worker receives all columns of the TransferQueue; no issue is known",
    until=_UNTIL,
    needed=False,
)
PATCHES = (SELECT, COLUMNS)

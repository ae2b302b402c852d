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
"""Which part of the trainer's tensors a vLLM worker holds, and where: the inverse of vLLM's weight loaders.

vLLM stacks q/k/v and gate/up into one parameter and keeps only this rank's shard of it. The contract check compares the
trainer's tensors with live storage, so it has to find each of them again. That is computed here from the layers'
shapes and ranks, independently of the loaders, whose work is what is being checked.
"""

from collections.abc import Iterator

import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_verl.layers import MERGED
from jetrl_verl.numerics import BLOCK, FP8_DTYPE
from jetrl_verl.observe.contract import SCALE_SUFFIX, LiveTensor


def _pieces(layer: torch.nn.Module) -> Iterator[tuple[int, int, int]]:
    """(rows held, first row in the parameter, first row in the trainer's tensor) of each stacked piece."""
    if isinstance(layer, QKVParallelLinear):
        q = layer.num_heads * layer.head_size
        kv = layer.num_kv_heads * layer.head_size
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        yield q, 0, layer.tp_rank * q
        yield kv, q, kv_rank * kv
        yield kv, q + kv, kv_rank * kv
    else:
        start = 0
        for size in layer.output_sizes:
            rows = size // layer.tp_size
            yield rows, start, layer.tp_rank * rows
            start += rows


def _held(
    parameter: torch.Tensor, scales: torch.Tensor | None, start: int, rows: int, whole_rows: int, columns: slice
) -> LiveTensor:
    view = parameter.data[start : start + rows]
    if scales is not None:
        scales = scales.data[start // BLOCK : (start + rows) // BLOCK]
    return LiveTensor(view, scales, slice(whole_rows, whole_rows + rows), columns)


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """Every tensor of the trainer that this worker holds a part of, under the trainer's name.

    Args:
        model: vLLM's model of this worker.

    Returns:
        name -> live view. Column-parallel parts are row slices, row-parallel ones column slices, of the whole tensor.
    """
    parameters = dict(model.named_parameters())
    live: dict[str, LiveTensor] = {}
    owners = {id(module): (name, module) for name, module in model.named_modules()}
    for prefix, layer in owners.values():
        for leaf, parameter in layer.named_parameters(recurse=False):
            if leaf.endswith(SCALE_SUFFIX):
                continue
            name = f"{prefix}.{leaf}"
            scales = parameters.get(name + SCALE_SUFFIX) if parameter.dtype == FP8_DTYPE else None
            columns = slice(0, parameter.shape[1] if parameter.ndim > 1 else 1)
            suffix = ".".join(prefix.rsplit(".", 2)[-2:])
            if isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear) and suffix in MERGED:
                stem = prefix.removesuffix(suffix)
                for piece, (rows, start, whole_rows) in zip(MERGED[suffix], _pieces(layer), strict=True):
                    live[f"{stem}{piece}.{leaf}"] = _held(parameter, scales, start, rows, whole_rows, columns)
            elif isinstance(layer, VocabParallelEmbedding):
                shard = layer.shard_indices
                rows = shard.org_vocab_end_index - shard.org_vocab_start_index
                live[name] = _held(parameter, None, 0, rows, shard.org_vocab_start_index, columns)
            else:
                if isinstance(layer, RowParallelLinear) and parameter.ndim > 1:
                    first = layer.tp_rank * parameter.shape[1]
                    columns = slice(first, first + parameter.shape[1])
                live[name] = _held(parameter, scales, 0, parameter.shape[0], 0, columns)
    return live

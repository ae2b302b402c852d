# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the streams and pieces of a weight sync as a worker does, into one tensor per name."""

from collections.abc import Iterable, Iterator

import torch

from jetrl_verl.formats import UNQUANTIZED
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models import family
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.contract import ContractReceiver
from jetrl_verl.sync.operations_probe import stated_operations, stated_probe
from jetrl_verl.sync.quantize import Weight, as_tensors, quantize_stream
from jetrl_verl.sync.stacks import Name, Stack, parts_of
from jetrl_verl.sync.statement import Manifest, Statement
from jetrl_verl.sync.wire import Kind, Part, entries_of, packed
from jetrl_verl.train.weight_stream import stated_constants, sync_parts


def unstacked(stream: Iterable[tuple[Name, Weight]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a stream under its own name, scales apart."""
    for item in as_tensors(stream):
        yield from parts_of(*item)


def stacked(model):
    """A model's stream with q, k, v, gate and up of all layers in one tensor, o and down in another, and all norms."""
    state = model.state_dict()
    ends = [("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj",), ("down_proj",), ("norm", "layernorm")]
    for end in ends:
        names = [name for name in state if name.endswith(tuple(f"{projection}.weight" for projection in end))]
        yield Stack(tuple(names), tuple(len(state[name]) for name in names)), torch.cat([state[name] for name in names])
    yield from ((name, state[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))


class Arrived(dict):
    """Name -> tensor of a sync's pieces.

    Attributes:
        manifest: of the statement, None without one. sums: name -> its stated sums.
        quantized, plain: the names that the statement has as qdata, and the others.
    """

    def __init__(self, pieces: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.manifest, self.sums, self.quantized, self.plain = None, {}, [], []
        for name, piece in pieces:
            for entry in entries_of(name):
                tensor = entry.of(piece).clone()
                if entry.kind == Kind.MANIFEST:
                    self.manifest = Manifest.from_tensor(tensor)
                elif entry.kind == Kind.SUMS:
                    sums = tensor
                else:
                    suffix = SCALE_SUFFIX if entry.kind == Kind.SCALES else ""
                    self.update((single + suffix, part) for single, part in parts_of(entry.name, tensor))
        if self.manifest is not None:
            for name, number_format, places in self.manifest.places():
                self.sums[name] = sums[places]
                (self.plain if number_format == UNQUANTIZED else self.quantized).append(name)


def same(x: Arrived, y: Arrived) -> bool:
    """Whether two weight syncs have the same tensors, in every bit."""
    return x.keys() == y.keys() and all(
        torch.equal(t.view(torch.uint8), y[name].view(torch.uint8)) for name, t in x.items()
    )


def parts_of_model(
    model,
    linears: str = "fp8",
    operations: str = "stock",
    kv_cache: str = "bf16",
    rule: str = "fp32",
    *,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    plans=None,
    **facts,
) -> Iterator[Part]:
    """The parts of a weight sync of a trainer's model, which has its shared operations already.

    Args:
        linears: format of the linear layers. weights: other ones than the model's without its tower.
        plans: of the model, changed. facts: of the statement, changed.
    """
    names, device = family(model.config), model.device
    of_model = dict(mixture=linears if names.experts else None, variant=names.variant(model.config))
    stated = dict(operations=stated_operations(device, operations, kv_cache, **of_model))
    stated |= dict(constants=stated_constants(model), probe=stated_probe(device, linears, rule))
    if weights is None:
        weights = ((name, weight) for name, weight in model.state_dict().items() if ".visual." not in name)
    plans = plans or plan_linears(model.config, format_name=linears)
    return sync_parts(quantize_stream(weights, plans, rule), Statement(scale_rule=rule, **stated | facts))


def receiver_of(weights: Iterable[tuple[Name, Weight]], **facts) -> ContractReceiver:
    """A worker's receiver after a sync of these weights; ``facts`` of the :class:`Statement`."""
    receiver = ContractReceiver()
    receiver.take(packed(sync_parts(weights, Statement(**facts))))
    return receiver

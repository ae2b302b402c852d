# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How a norm hands its quantized output to the linears behind it: as a :class:`QuantizedTensor` in the tensor's place.

q, k and v read one norm and nobody else does; so do gate and up. The norm's output is therefore quantized once, where
it is written, and the layers get the data itself, not a tensor that they would have to recognize. vLLM's norms do the
same (rollout/shared_operations.py). Here a stock norm gets a forward hook; a shared one (train/shared_operations.py)
quantizes in its own kernel and the hook has nothing to do.

Whether a norm's readers accept it is asked in every call: a BF16 shadow forward turns them into ``nn.Linear`` for a
while (algorithms/shadow.py), and a linear that FSDP wraps by itself casts its inputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from jetrl_verl.models.families.base import place
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear, quantize_input
from jetrl_verl.reference import QuantizedTensor


def accept_quantized(readers: Sequence[nn.Module]) -> bool:
    """Whether every one of ``readers`` accepts a :class:`QuantizedTensor` now."""
    # type(), not isinstance: FSDP2 turns a linear that it wraps by itself into a subclass.
    return all(type(reader) in (JetLinear, JetExperts) for reader in readers)


def _quantize_output(
    norm: nn.Module, inputs: Any, output: torch.Tensor | QuantizedTensor, *, readers: Sequence[nn.Module]
) -> QuantizedTensor | None:
    """Forward hook of a norm; None leaves its output alone."""
    if isinstance(output, QuantizedTensor) or not accept_quantized(readers):
        return None
    return quantize_input(output, readers[0].format, readers[0].scale_rule)


def hand_over(model: nn.Module, fed_by_norms: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Let the norms of every decoder layer quantize what they write.

    Args:
        model: its linears replaced already, before FSDP wraps it.
        fed_by_norms: (norm, the linears that read it), as named below a decoder layer.
    """
    places = (place(name) for name, _ in model.named_modules())
    for name in dict.fromkeys(found.layer for found in places if found is not None):
        layer = model.get_submodule(name)
        for norm, names in fed_by_norms:
            readers = [layer.get_submodule(each) for each in names]
            if accept_quantized(readers):
                layer.get_submodule(norm).register_forward_hook(partial(_quantize_output, readers=readers))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A norm quantizes its output once for all linears that read it, and hands them a :class:`QuantizedTensor`.

q, k and v are a norm's only readers, and so are gate and up; vLLM's norms do the same (rollout/shared_operations.py). A
stock norm gets a forward hook; a shared one (train/shared_operations.py) quantizes in its kernel. Each call asks
whether the readers accept it: a BF16 shadow forward turns them into ``nn.Linear`` (train/shadow.py).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from jetrl_verl.models.families.base import Family
from jetrl_verl.nn.experts import JetExperts
from jetrl_verl.nn.linear import JetLinear, quantize_input
from jetrl_verl.reference import QuantizedTensor


def accept_quantized(readers: Sequence[nn.Module]) -> bool:
    """Whether all ``readers`` accept a :class:`QuantizedTensor` now."""
    # type(), not isinstance: FSDP2 makes a linear that it wraps alone a subclass, and casts its inputs.
    return all(type(reader) in (JetLinear, JetExperts) for reader in readers)


def _quantize_output(
    norm: nn.Module, inputs: Any, output: torch.Tensor | QuantizedTensor, *, readers: Sequence[nn.Module]
) -> QuantizedTensor | None:
    """Forward hook of a norm; None keeps its output."""
    if isinstance(output, QuantizedTensor) or not accept_quantized(readers):
        return None
    return quantize_input(output, readers[0].format, readers[0].scale_rule)


def hand_over(model: nn.Module, decoder: Family) -> None:
    """Let the norms of every decoder layer quantize their output.

    Args:
        model: with replaced linears, before FSDP wraps it. decoder: its family.
    """
    for layer, names in decoder.named_layers(model):
        for norm, fed in names.fed_by_norms:
            readers = [layer.get_submodule(name) for name in fed]
            if accept_quantized(readers):
                layer.get_submodule(norm).register_forward_hook(partial(_quantize_output, readers=readers))

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses NaN and Inf in the trainer's weights, at each sync and before each checkpoint.

The contract check passes them, because both sides hold the same NaN.
"""

import torch
from torch import nn

from jetrl_verl.formats.format import Format, QuantizedWeight
from jetrl_verl.sync.quantize import Weight
from jetrl_verl.sync.stacks import Name, parts_of

_REMEDY = "resume from the last checkpoint, and lower the learning rate or the gradient clip if it happens again"


class NonFiniteWeightError(RuntimeError):
    """A weight has NaN or Inf; the message names it."""


class FiniteCheck:
    """Looks for NaN and Inf in the weights of one sync; of a quantized weight it reads one value per scale."""

    def __init__(self) -> None:
        self._quantized: dict[Format, list[tuple[Name, torch.Tensor, torch.Tensor]]] = {}
        """Format -> (name, ``nan_sample``, scales) of its weights."""
        self._plain: dict[Name, torch.Tensor] = {}
        """Name -> vector, or extremes of rows."""

    def add(self, name: Name, weight: Weight) -> None:
        """Read a weight, or a stack of them."""
        if isinstance(weight, QuantizedWeight):
            sample = weight.format.nan_sample(weight.qdata)
            self._quantized.setdefault(weight.format, []).append((name, sample, weight.scales))
        elif weight.is_floating_point():
            self._plain[name] = _unless_small(weight)

    def finish(self) -> None:
        """Wait for the device once.

        Raises:
            NonFiniteWeightError: naming the weights.
        """
        broken = self._non_finite()
        if broken:
            raise NonFiniteWeightError(
                f"weight sync: {_named(broken)} of the trainer has NaN or Inf, and samples would be garbage; {_REMEDY}"
            )

    def _non_finite(self) -> list[str]:
        bad = [
            number_format.is_nan(
                torch.cat([sample for _, sample, _ in read]), torch.cat([scales.reshape(-1) for _, _, scales in read])
            )
            for number_format, read in self._quantized.items()
        ]
        if self._plain:
            bad.append(~torch.cat([values.reshape(-1) for values in self._plain.values()]).isfinite().all())
        if not bad or not torch.stack(bad).any().item():
            return []
        single = {
            name: number_format.is_nan(sample, scales)
            for number_format, read in self._quantized.items()
            for whole, samples, all_scales in read
            for (name, sample), (_, scales) in zip(parts_of(whole, samples), parts_of(whole, all_scales), strict=True)
        }
        single |= {
            name: ~part.isfinite().all()
            for whole, values in self._plain.items()
            for name, part in parts_of(whole, values)
        }
        return [
            name for name, is_bad in zip(single, torch.stack(list(single.values())).tolist(), strict=True) if is_bad
        ]


def refuse_to_save_non_finite(model: nn.Module) -> None:
    """Refuse to save a checkpoint with NaN or Inf, since every resume would end at its first sync. Collective.

    Raises:
        NonFiniteWeightError: on every rank, naming the weights of its own shards.
    """
    shards = {name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()}
    extremes = {name: _extremes(shard) for name, shard in shards.items() if shard.numel() > 0}
    non_finite = torch.zeros((), dtype=torch.int32, device=next(iter(shards.values())).device)
    if extremes:
        non_finite += ~torch.stack(list(extremes.values())).isfinite().all()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(non_finite, torch.distributed.ReduceOp.MAX)
    if non_finite:
        broken = [name for name, pair in extremes.items() if not pair.isfinite().all()]
        raise NonFiniteWeightError(
            f"checkpoint: {_named(broken) or 'a weight on another rank'} of the trainer has NaN or Inf, so it is not "
            f"saved; {_REMEDY}"
        )


def _named(broken: list[str]) -> str:
    names = ", ".join(broken[:3])
    return names + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")


def _unless_small(tensor: torch.Tensor) -> torch.Tensor:
    """A vector itself, or the extremes of each row of a matrix, to be kept until the end of a sync."""
    return tensor if tensor.ndim <= 1 else torch.stack(torch.aminmax(tensor.flatten(1), dim=1), dim=1)


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    # torch.aminmax propagates NaN and needs no temporary of the tensor's size.
    return torch.stack(torch.aminmax(tensor)).float()

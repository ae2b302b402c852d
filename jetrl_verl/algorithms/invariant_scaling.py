# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""QuRL's invariant scaling (arXiv 2602.13953): the same function with larger relative weight updates.

``W X = (W / s) (s X)`` is folded once before training: weights after an RMSNorm are divided by s and the norm's weight
is multiplied by s; one with a unit offset becomes ``(1 + w) s - 1``. It covers projections that a norm feeds directly
(``Family.fed_by_norms``). The qdata of W / s is that of W up to rounding, but Adam's steps do not depend on a weight's
size, so they move s times as many codes. A factor other than a power of two rounds: half an ulp of the FP32 master
weights (with a unit offset of ``1 + w``), and once more in their BF16 cast.

s is part of the master weights and of every checkpoint; the model's configuration says so under ``FOLDED``. ``jetrl
export`` takes it out of the BF16 folder and keeps it in the FP8 one. A run that starts from such a folder folds in what
is missing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from jetrl_verl import models
from jetrl_verl.config.support.table import refuse
from jetrl_verl.models.families.base import Family, place
from jetrl_verl.models.modules import check_scaling

FOLDED = "jetrl_invariant_scaling"
"""Key of ``config.json``: the factor in the weights next to it."""


def folded_in(config: Any) -> float:
    """The factor of a Hugging Face configuration, object or mapping; 1 if nothing was folded."""
    return config.get(FOLDED, 1.0) if isinstance(config, Mapping) else getattr(config, FOLDED, 1.0)


def check_resumed(folder: str | Path, s: float) -> None:
    """Check that a checkpoint's weights have the factor ``s`` of the model that loads it.

    Args:
        folder: ``.../global_step_<n>/actor``; remote paths are not checked.

    Raises:
        UnsupportedConfiguration: another factor; moments and later checkpoints would not fit the weights.
    """
    config = Path(folder) / "huggingface" / "config.json"
    if config.is_file() and (saved := folded_in(json.loads(config.read_text()))) != s:
        of = f"jetrl.invariant_scaling={saved:g}"
        what, scope = f"the checkpoint {folder}, trained with {of},", f"jetrl.invariant_scaling={s:g}"
        refuse("checkpoint_of_another_factor", what=what, scope=scope, remedy=f"Set {of}")


def _kinds(family: Family) -> dict[str, str]:
    """Module of a decoder layer -> ``norm`` or ``projection``, of those that the factor is in."""
    kinds = {name: "projection" for _, pieces in family.fed_by_norms for name in pieces}
    return kinds | {norm: "norm" for norm, _ in family.fed_by_norms}


def _kind_of(name: str, kinds: Mapping[str, str]) -> str:
    """Of a parameter's name; empty if the factor is not in it."""
    at = place(name)
    return kinds.get(at.module, "") if at is not None and at.leaf == "weight" else ""


@torch.no_grad()
def fold(parameters: Iterable[tuple[str, torch.Tensor]], s: float, family: Family) -> list[str]:
    """Fold ``s`` into a model, in place.

    Args:
        parameters: a model's ``named_parameters()`` or the items of its state dict, whole tensors, before FSDP.
        s: the factor, above 0. family: the model's.

    Returns:
        Names of the changed tensors.

    Raises:
        UnsupportedLayer: a decoder layer lacks one of the norms or projections.
    """
    weights, kinds = dict(parameters), _kinds(family)
    check_scaling(weights, family)
    changed = [name for name in weights if _kind_of(name, kinds)]
    for name in changed:
        if _kind_of(name, kinds) == "projection":
            weights[name].div_(s)
            continue
        weights[name].mul_(s)
        if family.unit_offset:
            weights[name].add_(s - 1)
    return changed


def fold_missing(model: torch.nn.Module, s: float) -> None:
    """Fold ``s`` into a Hugging Face model, in place, over the factor that it already has, and note it."""
    folded = folded_in(model.config)
    if s != folded:
        fold(model.named_parameters(), s / folded, models.family(model.config))
        setattr(model.config, FOLDED, s)


def unfolded(
    weights: Iterable[tuple[str, torch.Tensor]], s: float, family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    """A folded model's tensors without ``s``, for an export.

    Args:
        weights: (name, whole tensor) in FP32; BF16 tensors would be rounded a second time.
        s: the factor that was folded in. family: the model's.

    Yields:
        The same names, in the same order and dtypes.
    """
    kinds = _kinds(family)
    for name, tensor in weights:
        kind = _kind_of(name, kinds)
        if kind == "norm":
            tensor = tensor / s + (1 - s) / s if family.unit_offset else tensor / s
        yield name, tensor * s if kind == "projection" else tensor

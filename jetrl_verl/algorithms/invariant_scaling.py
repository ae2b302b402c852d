# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""QuRL's invariant scaling (arXiv 2602.13953): the same function with larger relative weight updates.

``W X = (W / s) (s X)``, folded once before training: the weights behind an RMSNorm are divided by s and the norm's own
weight is multiplied by s, so that the norm delivers s X without an extra operation. Only a projection that a norm feeds
directly can take part: q, k and v behind the norm in front of attention, gate and up behind the one in front of the
MLP (``Family.fed_by_norms``). Biases, the output projections of attention and MLP, the norms on queries and keys, the
final norm and the head stay as they are.

**What it does.** Quantized with a dynamic scale, W / s has the qdata of W but for rounding, and so has s X. What
changes is training: Adam moves a weight by about the learning rate whatever its size, and a weight that is smaller by s
then moves by s times as many qdata. The fair control is s times the learning rate. The paper has 30.63 -> 31.25 on
AIME24 with s = 1.5, 29.15 with s = 2, and 29.06 with 1.5 times the learning rate.

**What it costs.** s = 1.5 is no power of two, so folding rounds: by half a unit in the last place of the FP32 master
weights, and once more where they are cast to BF16. A checkpoint's weights are BF16 values already and do not change
in that cast, W / 1.5 does: it costs up to 2^-8 relative per weight of those layers and of the norm, as if they had been
rounded to BF16 once more. A power of two costs nothing. Unfolding in FP32 returns an unchanged weight to within one
unit in the last place, and the BF16 cast that a checkpoint ends in then returns it exactly.

**Where it lives.** In the master weights, and so in every checkpoint of the run; the model's configuration, which verl
writes beside them, says so under ``FOLDED``. ``jetrl export`` takes s out of the BF16 folder. The FP8 folder keeps it,
since its qdata are those that the rollout held. A run that starts from a folder that says so (verl's ``hf_model`` of an
earlier stage) folds in only what is missing, so its weights carry its own ``jetrl.invariant_scaling`` and no product.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from jetrl_verl import models
from jetrl_verl.config.support.table import refuse
from jetrl_verl.models.families.base import Family, place

FOLDED = "jetrl_invariant_scaling"
"""Key of ``config.json``: the factor in the weights beside it."""


def _check(s: float) -> None:
    if not 0 < s < float("inf"):
        raise ValueError(f"invariant scaling by {s} is undefined; use a positive factor, or 1 for none.")


def folded_in(config: Any) -> float:
    """The factor in the weights of a Hugging Face configuration, object or mapping; 1 where nothing was folded."""
    return config.get(FOLDED, 1.0) if isinstance(config, Mapping) else getattr(config, FOLDED, 1.0)


def check_resumed(folder: str | Path, s: float) -> None:
    """Raise unless a checkpoint's weights carry ``s``, as those of the model that it is loaded into do.

    Args:
        folder: ``.../global_step_<n>/actor``; a path on a remote file system is left to verl.

    Raises:
        UnsupportedConfiguration: it carries another factor; moments and later checkpoints would not fit the weights.
    """
    config = Path(folder) / "huggingface" / "config.json"
    if config.is_file() and (saved := folded_in(json.loads(config.read_text()))) != s:
        refuse("checkpoint_of_another_factor", folder=folder, saved=f"{saved:g}", factor=f"{s:g}")


@torch.no_grad()
def fold(parameters: Iterable[tuple[str, torch.Tensor]], s: float, family: Family) -> list[str]:
    """Fold ``s`` into a model, in place.

    Args:
        parameters: a model's ``named_parameters()`` or the items of its state dict, whole tensors, before FSDP.
        s: the factor. family: the model's.

    Returns:
        Names of the changed tensors.

    Raises:
        UnsupportedConfiguration: a decoder layer without these norms and projections, which scaling would change as a
            function.
        ValueError: ``s`` is not a positive number.
    """
    _check(s)
    norms = [norm for norm, _ in family.fed_by_norms]
    projections = [name for _, pieces in family.fed_by_norms for name in pieces]
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in parameters:
        where = place(name)
        if where is not None and where.leaf == "weight":
            found.setdefault(where.layer, {})[where.module] = (name, tensor)
    for layer, weights in found.items():
        missing = [module for module in (*norms, *projections) if module not in weights]
        if missing:
            refuse("layer_without_scaling", layer=layer, missing=missing[0], factor=f"{s:g}")
    changed = []
    for weights in found.values():
        for module in (*norms, *projections):
            name, tensor = weights[module]
            if module in norms:
                tensor.mul_(s)
            else:
                tensor.div_(s)
            changed.append(name)
    return changed


def fold_missing(model: torch.nn.Module, s: float) -> None:
    """Fold ``s`` into a Hugging Face model, in place, less the factor that its weights carry; its configuration then
    says ``s``.

    Raises:
        ValueError: as :func:`fold`.
    """
    folded = folded_in(model.config)
    if s != folded:
        fold(model.named_parameters(), s / folded, models.family(model.config))
        setattr(model.config, FOLDED, s)


def unfolded(
    weights: Iterable[tuple[str, torch.Tensor]], s: float, family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    """A folded model's tensors with ``s`` taken out again, for an export; nothing is changed in place.

    Args:
        weights: (name, whole tensor), in the master weights' FP32: a BF16 tensor would be rounded a second time.
        s: the factor that was folded in. family: the model's.

    Yields:
        The same names in the same order, same types.

    Raises:
        ValueError: ``s`` is not a positive number.
    """
    _check(s)
    norms = [norm for norm, _ in family.fed_by_norms]
    projections = [name for _, pieces in family.fed_by_norms for name in pieces]
    for name, tensor in weights:
        where = place(name)
        module = where.module if where is not None and where.leaf == "weight" else ""
        yield name, tensor / s if module in norms else tensor * s if module in projections else tensor

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
"""QuRL's invariant scaling (arXiv 2602.13953): the same function with larger relative weight updates.

``W X = (W / s) (s X)``, folded once before training: the weights behind an RMSNorm are divided by s and the norm's own
weight is multiplied by s, so that the norm delivers s X without an extra operation. Only a projection that a norm feeds
directly can take part:

    input_layernorm           -> q_proj, k_proj, v_proj
    post_attention_layernorm  -> gate_proj, up_proj

Biases, o_proj, down_proj, the norms on queries and keys, the final norm and lm_head stay as they are.

**What it does.** Quantised with a dynamic scale, W / s has the codes of W but for rounding, and so has s X. What
changes is training: Adam moves a weight by about the learning rate whatever its size, and a weight that is smaller by s
then moves by s times as many codes. The fair control is s times the learning rate. The paper has 30.63 -> 31.25 on
AIME24 with s = 1.5, 29.15 with s = 2, and 29.06 with 1.5 times the learning rate.

**What it costs.** s = 1.5 is no power of two, so folding rounds: by half a unit in the last place of the FP32 master
weights, and once more where they are cast to BF16. A checkpoint's weights are BF16 values already and survive that cast
unharmed, W / 1.5 does not: it costs up to 2^-8 relative per weight of those layers and of the norm, as if they had been
rounded to BF16 once more. A power of two costs nothing. Unfolding in FP32 returns an unchanged weight to within one
unit in the last place, and the BF16 cast that a checkpoint ends in then returns it exactly.

**Where it lives.** In the master weights, and so in every checkpoint of the run; the model's configuration, which verl
writes beside them, says so under ``FOLDED``. ``jetrl export`` takes s out of the BF16 folder. The FP8 folder keeps it,
since its codes are those that the rollout held. A run that starts from a folder that says so (verl's ``hf_model`` of an
earlier stage) folds in only what is missing, so its weights carry its own ``jetrl.invariant_scaling`` and no product.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from jetrl_verl.config.options import UnsupportedConfiguration
from jetrl_verl.layers import UnsupportedLayer

FOLDED = "jetrl_invariant_scaling"
"""Key of ``config.json``: the factor in the weights beside it."""

NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of a decoder layer that carry s."""

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Projections that those norms feed and nothing else does."""


def _place(name: str) -> tuple[str, str]:
    """(decoder layer, module in it) of a weight, empty strings for every other tensor."""
    stem, _, rest = name.rpartition(".layers.")
    layer, _, module = rest.removesuffix(".weight").partition(".")
    return (f"{stem}.layers.{layer}", module) if stem and name.endswith(".weight") else ("", "")


def _check(s: float) -> None:
    if not 0 < s < float("inf"):
        raise ValueError(f"invariant scaling by {s} is undefined; use a positive factor, or 1 for none.")


def folded_in(config: Any) -> float:
    """The factor in the weights of a Hugging Face configuration, object or mapping; 1 where nothing was folded."""
    return config.get(FOLDED, 1.0) if isinstance(config, Mapping) else getattr(config, FOLDED, 1.0)


def check_resumed(folder: str | Path, s: float) -> None:
    """Refuse a checkpoint whose weights do not carry ``s``, which the model that it is loaded into does.

    Args:
        folder: ``.../global_step_<n>/actor``; a path on a remote file system is left to verl.

    Raises:
        UnsupportedConfiguration: it carries another factor; moments and later checkpoints would not fit the weights.
    """
    config = Path(folder) / "huggingface" / "config.json"
    if config.is_file() and (saved := folded_in(json.loads(config.read_text()))) != s:
        raise UnsupportedConfiguration(
            f"the checkpoint {folder} was trained with jetrl.invariant_scaling={saved:g} and this run has {s:g}; set "
            f"jetrl.invariant_scaling={saved:g}."
        )


@torch.no_grad()
def fold(parameters: Iterable[tuple[str, torch.Tensor]], s: float) -> list[str]:
    """Fold ``s`` into a model, in place.

    Args:
        parameters: a model's ``named_parameters()`` or the items of its state dict, whole tensors, before FSDP.
        s: the factor.

    Returns:
        Names of the changed tensors.

    Raises:
        UnsupportedLayer: a decoder layer without these norms and projections, which scaling would change as a function.
        ValueError: ``s`` is not a positive number.
    """
    _check(s)
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in parameters:
        layer, module = _place(name)
        if layer:
            found.setdefault(layer, {})[module] = (name, tensor)
    for layer, modules in found.items():
        missing = [module for module in (*NORMS, *PROJECTIONS) if module not in modules]
        if missing:
            raise UnsupportedLayer(
                f"{layer} has no {missing[0]}, so invariant scaling would change what the model computes; "
                "use jetrl.invariant_scaling=1 for this model"
            )
    changed = []
    for modules in found.values():
        for module in (*NORMS, *PROJECTIONS):
            name, tensor = modules[module]
            if module in NORMS:
                tensor.mul_(s)
            else:
                tensor.div_(s)
            changed.append(name)
    return changed


def fold_missing(model: torch.nn.Module, s: float) -> None:
    """Fold into a Hugging Face model, in place, what its weights lack of ``s``; its configuration then says ``s``.

    Raises:
        UnsupportedLayer, ValueError: as :func:`fold`.
    """
    folded = folded_in(model.config)
    if s != folded:
        fold(model.named_parameters(), s / folded)
        setattr(model.config, FOLDED, s)


def unfolded(weights: Iterable[tuple[str, torch.Tensor]], s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """A folded model's tensors with ``s`` taken out again, for an export; nothing is changed in place.

    Args:
        weights: (name, whole tensor), in the master weights' FP32: a BF16 tensor would be rounded a second time.
        s: the factor that was folded in.

    Yields:
        The same names in the same order, same types.

    Raises:
        ValueError: ``s`` is not a positive number.
    """
    _check(s)
    for name, tensor in weights:
        _, module = _place(name)
        yield name, tensor / s if module in NORMS else tensor * s if module in PROJECTIONS else tensor

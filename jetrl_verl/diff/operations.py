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
"""The operations of a dense decoder in the order in which they are computed: what both sides are cut into.

Each has one output per token and takes outputs of earlier ones alone (attention takes those of earlier tokens too), so
a difference that is first in this order was made by the operation that it shows in. Both sides are cut at the same
places: what vLLM merges (q/k/v, gate/up) is split, and a residual sum, which vLLM computes inside its norm, is an
operation of its own whose kind is the norm's.
"""

from typing import NamedTuple

KINDS = ("embedding", "linear", "norm", "rotary", "attention", "activation", "lm_head", "sampler")
"""What an operation is. Of these the projections alone (``linear``) are quantised."""

_OF_LAYER = {
    "input_residual": "norm",
    "input_norm": "norm",
    "q_proj": "linear",
    "k_proj": "linear",
    "v_proj": "linear",
    "q_norm": "norm",
    "k_norm": "norm",
    "q_rotary": "rotary",
    "k_rotary": "rotary",
    "attention": "attention",
    "o_proj": "linear",
    "post_residual": "norm",
    "post_norm": "norm",
    "gate_proj": "linear",
    "up_proj": "linear",
    "activation": "activation",
    "down_proj": "linear",
}
_FIRST = {"embedding": "embedding"}
_LAST = {"final_residual": "norm", "final_norm": "norm", "lm_head": "lm_head", "sampler": "sampler"}
KIND_OF = _FIRST | _OF_LAYER | _LAST
"""Name of an operation -> its kind, in the order of computation."""


class Operation(NamedTuple):
    """One operation of one decoder layer; ``layer`` is None before the first and behind the last."""

    layer: int | None
    name: str

    @property
    def kind(self) -> str:
        return KIND_OF[self.name]

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


def operations(layers: int, qk_norm: bool) -> list[Operation]:
    """All operations of a decoder of ``layers`` layers, in order; ``qk_norm``: queries and keys are normalised."""
    # The first layer's input is no sum yet.
    absent = set() if qk_norm else {"q_norm", "k_norm"}
    return [
        *(Operation(None, name) for name in _FIRST),
        *(
            Operation(layer, name)
            for layer in range(layers)
            for name in _OF_LAYER
            if name not in absent and (layer, name) != (0, "input_residual")
        ),
        *(Operation(None, name) for name in _LAST),
    ]

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
"""Which models the shared operations cover, told from the configuration alone, before a process is started."""

from collections.abc import Mapping
from typing import Any

from jetrl_verl.ops.attention import check_head_dim
from jetrl_verl.ops.rotary import rotary_table

FIELDS = (
    "attention_dropout",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "layer_types",
    "logit_scale",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
"""What of a model's configuration decides, by any of its names."""


def check_model(config: Any) -> None:
    """Raise ``ValueError`` (one sentence) unless the shared operations cover a model.

    Args:
        config: Hugging Face configuration of a dense decoder, object or mapping.
    """

    def get(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    head_dim = get("head_dim", get("hidden_size") // get("num_attention_heads"))
    check_head_dim(head_dim)
    rotary_table(head_dim, 1, get("rope_parameters"))
    layer_types = get("layer_types", [])
    sliding = "sliding_attention" in layer_types or (not layer_types and get("sliding_window") is not None)
    for wrong, what in (
        (get("hidden_act") != "silu", f"the activation {get('hidden_act')}"),
        (sliding, "sliding window attention"),
        (get("attention_dropout", 0.0) != 0.0, "attention dropout"),
        (get("attn_logit_softcapping") or get("final_logit_softcapping"), "soft-capped scores or logits"),
        (get("logit_scale", 1.0) != 1.0, "scaled logits"),
    ):
        if wrong:
            raise ValueError(f"the shared operations do not cover {what}; use precision=jet_fp8 jetrl.operations=stock")

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
"""Which linear layers of a dense decoder run in FP8: the one rule that trainer, rollout and start-up checks all ask.

A layer is quantised on both sides or on neither. Whether it *can* be depends on its shape and on how the rollout shards
it: every tensor-parallel shard, and every piece of a merged projection (q/k/v, gate/up), must be a multiple of 128 in
both dimensions, because a 128x128 block never crosses a shard. So the plan is made from the model's configuration and
the rollout's tensor-parallel size alone, before a process is started, and pieces that vLLM merges stand or fall
together. Embeddings, norms, rotary, the attention core and ``lm_head`` stay BF16 by contract.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_verl.numerics.formats import BLOCK

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders whose linears are named q/k/v/o_proj and gate/up/down_proj and that vLLM merges as listed below."""

MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""vLLM module of a decoder layer -> the Hugging Face modules it is stacked from, in row order."""

ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
"""Projections sharded along their input (K) dimension under tensor parallelism; all others along N."""


class UnsupportedLayer(ValueError):
    """A model or one of its linear layers cannot take part in the FP8 flow; the message says which and what to do."""


@dataclass(frozen=True)
class LinearPlan:
    """One projection of every decoder layer.

    Attributes:
        suffix: name below ``model.layers.<i>.``, for example ``self_attn.q_proj``.
        n: output features of the whole layer. k: input features of the whole layer.
        shard_n: output features per tensor-parallel rank. shard_k: input features per rank.
        quantised: whether it runs in FP8 on both sides.
        reason: why not, empty when it is.
    """

    suffix: str
    n: int
    k: int
    shard_n: int
    shard_k: int
    quantised: bool
    reason: str = ""


def _get(config: Any, name: str, default: Any = None) -> Any:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def _shapes(config: Any, tp: int) -> dict[str, tuple[int, int, int, int]]:
    """(n, k, shard_n, shard_k) of each projection."""
    hidden, inner = _get(config, "hidden_size"), _get(config, "intermediate_size")
    heads = _get(config, "num_attention_heads")
    kv_heads = _get(config, "num_key_value_heads", heads)
    head_dim = _get(config, "head_dim", hidden // heads)
    if _get(config, "model_type") == "qwen2" and head_dim != hidden // heads:
        raise UnsupportedLayer(
            f"vLLM's Qwen2 takes heads of hidden_size / num_attention_heads = {hidden // heads} and ignores head_dim = "
            f"{head_dim} of this model's configuration; use precision=bf16 with another rollout engine"
        )
    q, kv = heads * head_dim, kv_heads * head_dim
    # vLLM replicates key/value heads when there are fewer of them than ranks.
    kv_shard = max(kv_heads // tp, 1) * head_dim
    return {
        "self_attn.q_proj": (q, hidden, q // tp, hidden),
        "self_attn.k_proj": (kv, hidden, kv_shard, hidden),
        "self_attn.v_proj": (kv, hidden, kv_shard, hidden),
        "self_attn.o_proj": (hidden, q, hidden, q // tp),
        "mlp.gate_proj": (inner, hidden, inner // tp, hidden),
        "mlp.up_proj": (inner, hidden, inner // tp, hidden),
        "mlp.down_proj": (hidden, inner, hidden, inner // tp),
    }


def plan_linears(hf_config: Any, tp: int = 1, *, unfit_layers: str = "stop") -> dict[str, LinearPlan]:
    """Decide for every projection of a dense decoder whether it is quantised.

    Args:
        hf_config: Hugging Face configuration, object or mapping.
        tp: tensor-parallel size of the rollout.
        unfit_layers: ``"stop"`` raises at the first projection that does not fit; ``"skip"`` leaves it, and what is
            merged with it, BF16 on both sides.

    Returns:
        suffix -> plan, in the order q, k, v, o, gate, up, down.

    Raises:
        UnsupportedLayer: mixture-of-experts or unknown architecture; a shape that does not fit under ``"stop"``; under
            ``"skip"``, no projection left.
    """
    model_type = _get(hf_config, "model_type", "unknown")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedLayer(
            f"model_type {model_type!r} is not supported by the FP8 flow; use a dense model of type "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} or precision=bf16"
        )
    plans: dict[str, LinearPlan] = {}
    for suffix, (n, k, shard_n, shard_k) in _shapes(hf_config, tp).items():
        reason = ""
        if shard_n % BLOCK or shard_k % BLOCK:
            reason = (
                f"layer {suffix} has shards of shape [{shard_n}, {shard_k}] (whole [{n}, {k}], tensor parallel "
                f"size {tp}) and both must be multiples of {BLOCK}"
            )
        plans[suffix] = LinearPlan(suffix, n, k, shard_n, shard_k, not reason, reason)
    for pieces in (*MERGED.values(), *((name,) for name in ROW_PARALLEL)):
        reasons = [plans[piece].reason for piece in pieces if plans[piece].reason]
        if not reasons:
            continue
        if unfit_layers != "skip":
            raise UnsupportedLayer(
                f"{reasons[0]}; choose another tensor_model_parallel_size or keep such layers BF16 on both sides with "
                "jetrl.unfit_layers=skip"
            )
        for piece in pieces:
            plan = plans[piece]
            plans[piece] = LinearPlan(piece, plan.n, plan.k, plan.shard_n, plan.shard_k, False, reasons[0])
    if not any(plan.quantised for plan in plans.values()):
        raise UnsupportedLayer(f"no linear layer of this model fits the FP8 flow ({reasons[0]}); use precision=bf16")
    return plans


def plan_of(name: str, plans: Mapping[str, LinearPlan]) -> LinearPlan | None:
    """Plan of a module or parameter (``model.layers.3.self_attn.q_proj[.weight]``), None for all other names."""
    stem = name.removesuffix(".weight").removesuffix(".bias")
    parts = stem.rsplit(".", 2)
    return plans.get(".".join(parts[-2:])) if len(parts) == 3 and ".layers." in f".{stem}" else None

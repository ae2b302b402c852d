# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The weight sync of a mixture of experts sends a layer's experts as the one tensor that they are.

transformers keeps a layer's experts in two parameters, ``[E, 2 I, H]`` and ``[E, H, I]``, and vLLM does, too. verl
takes them apart in between, into one tensor a projection of each expert: 18,432 pieces a sync at Qwen3-30B-A3B where
there are 96. Our receiver copies whole tensors (rollout/experts.py), so under our precisions they stay whole.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from jetrl_verl.patches.patch import Patch

KEPT_FUSED: ContextVar[bool] = ContextVar("KEPT_FUSED", default=False)
"""Whether the weights that are asked for now stay fused. Set while the stream is made, not while it is read."""


def unfuse_moe_params(stock, weights: Iterable[tuple[str, Any]], model_type: str | None = None) -> Iterable:
    return weights if KEPT_FUSED.get() else stock(weights, model_type)


UNFUSE = Patch(
    replaces="verl.workers.engine.fsdp.utils:unfuse_moe_params",
    version="0.9.1",
    sha256="d0b7b27dd1b7ce4e67c0addabf0996b65003f5f62219759b23e68ea7d51a5ad3",
    by=unfuse_moe_params,
    symptom="a weight sync of a mixture of experts is hundreds of pieces a layer, for which our receiver has no place",
    upstream="verl writes for vLLM's own loader, which wants an expert's projections one by one; no issue is known",
    until="verl can send fused experts",
    needed=True,
)
PATCHES = (UNFUSE,)

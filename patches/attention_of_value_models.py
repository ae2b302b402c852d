# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A critic runs the attention that its configuration names.

verl 0.9.1 reads ``override_config.attn_implementation`` of every model, and then loads value models with
``flash_attention_2`` whatever it says. Where flash-attn is not installed, PPO ends with "is not a value head model,
please install trl". flash-attn is in neither of our stacks. The default stays verl's.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch


def load_valuehead_model(stock, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    named = model_config._attn_implementation
    if named in (None, "flash_attention_2"):
        return stock(local_path, torch_dtype, model_config, trust_remote_code)
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=named,
        trust_remote_code=trust_remote_code,
    )


NAMED_ATTENTION = Patch(
    replaces="verl.utils.model:load_valuehead_model",
    version="0.9.1",
    sha256="1f3cfb11a7e64db21ff9384bc03f7b4a54fd3b8f8ce87376d2b3c892719e4da8",
    by=load_valuehead_model,
    symptom="critic.model.override_config.attn_implementation is not read, and a critic needs flash-attn",
    upstream="no issue is known",
    until="verl loads value models with the attention of their configuration",
    needed=False,
)
PATCHES = (NAMED_ATTENTION,)

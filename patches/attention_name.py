# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation`` as verl hands it on: ours out of saved configurations, and the one that is named to a critic.

verl gives ``override_config.attn_implementation`` to transformers, which takes it as an argument of loading, and then
writes it into the configuration a second time, as a field. A checkpoint's ``config.json`` so names the trainer's
attention, and a process without this plugin does not know ours (train/varlen_attention.py). verl's loader of a critic
names ``flash_attention_2`` whatever was asked for; where flash-attn is not installed, as in our stacks, PPO then ends
with "is not a value head model, please install trl". flash-attn stays the default.
"""

from typing import Any

from jetrl_verl.patches.patch import Patch

JETRL_ATTENTION = "jetrl_varlen"
"""Value of ``attn_implementation`` that stands for attention over packed or padded batches without flash-attn."""


def update_model_config(stock, module_config: Any, override_config_kwargs: dict[str, Any]) -> None:
    ours = override_config_kwargs.get("attn_implementation") == JETRL_ATTENTION
    named = ("attn_implementation",) if ours else ()
    stock(module_config, {key: value for key, value in override_config_kwargs.items() if key not in named})


def load_valuehead_model(stock, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    named = model_config._attn_implementation
    if named in (None, "flash_attention_2"):
        return stock(local_path, torch_dtype, model_config, trust_remote_code)
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        config=model_config,
        dtype=torch_dtype,
        attn_implementation=named,
        trust_remote_code=trust_remote_code,
    )


CONFIGURATION = Patch(
    replaces="verl.utils.model:update_model_config",
    version="0.9.1",
    sha256="1d048eca5b897ace15d7154d3e90d3a42062801b7520b6580419cbeb3308b5c9",
    by=update_model_config,
    symptom="a checkpoint's config.json names the trainer's attention, and only processes with this plugin load it",
    upstream="the field is harmless for names that transformers knows; no issue is known",
    until="verl leaves the field out",
    needed=False,
)
VALUE_HEAD = Patch(
    replaces="verl.utils.model:load_valuehead_model",
    version="0.9.1",
    sha256="1f3cfb11a7e64db21ff9384bc03f7b4a54fd3b8f8ce87376d2b3c892719e4da8",
    by=load_valuehead_model,
    symptom="a critic asks for flash-attn whatever override_config.attn_implementation says, and fails without it",
    upstream="the name is written into the call; no issue is known",
    until="verl passes override_config.attn_implementation on",
    needed=False,
)
PATCHES = (CONFIGURATION, VALUE_HEAD)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keep ``jetrl_varlen`` out of saved configurations, and pass ``attn_implementation`` on to a critic.

verl writes ``override_config.attn_implementation`` into the saved ``config.json``, where a process without this plugin
cannot resolve our name (train/varlen_attention.py). Its loader of a critic always asks for ``flash_attention_2``;
without flash-attn PPO then ends with "is not a value head model, please install trl". It gives Qwen2.5-VL an attention
that calls flash-attn whatever the name; the layers keep transformers', which reads it. A vision tower attends in both
directions and gets transformers' sdpa.
"""

from types import MethodType
from typing import Any

from jetrl_verl.patches.patch import Patch

JETRL_ATTENTION = "jetrl_varlen"
"""``attn_implementation`` for packed or padded batches without flash-attn."""


def update_model_config(stock, module_config: Any, override_config_kwargs: dict[str, Any]) -> None:
    is_jetrl = override_config_kwargs.get("attn_implementation") == JETRL_ATTENTION
    dropped = ("attn_implementation",) if is_jetrl else ()
    stock(module_config, {key: value for key, value in override_config_kwargs.items() if key not in dropped})
    if is_jetrl and (tower := getattr(module_config, "vision_config", None)) is not None:
        tower._attn_implementation = "sdpa"


def load_valuehead_model(stock, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    attention = model_config._attn_implementation
    if attention in (None, "flash_attention_2"):
        return stock(local_path, torch_dtype, model_config, trust_remote_code)
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        config=model_config,
        dtype=torch_dtype,
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )


_FORWARDS: dict[type, Any] = {}
"""Classes of Qwen2.5-VL's attention -> transformers' forward, which verl replaces in a process for good."""


def apply_monkey_patch(stock, model: Any, *args: Any, **kwargs: Any) -> None:
    layers = [module for module in model.modules() if type(module).__name__ == "Qwen2_5_VLAttention"]
    for layer in layers:
        _FORWARDS.setdefault(type(layer), type(layer).forward)
    stock(model, *args, **kwargs)
    for layer in layers:
        if layer.config._attn_implementation != "flash_attention_2":
            layer.forward = MethodType(_FORWARDS[type(layer)], layer)


CONFIGURATION = Patch(
    replaces="verl.utils.model:update_model_config",
    sha256={"0.9.1": "1d048eca5b897ace15d7154d3e90d3a42062801b7520b6580419cbeb3308b5c9"},
    by=update_model_config,
    symptom="a checkpoint's config.json names the trainer's attention, and only processes with this plugin load it",
    upstream="the field is harmless for names that transformers knows; no issue is known",
    until="verl leaves the field out",
    needed=False,
)
VALUE_HEAD = Patch(
    replaces="verl.utils.model:load_valuehead_model",
    sha256={"0.9.1": "1f3cfb11a7e64db21ff9384bc03f7b4a54fd3b8f8ce87376d2b3c892719e4da8"},
    by=load_valuehead_model,
    symptom="a critic asks for flash-attn whatever override_config.attn_implementation says, and fails without it",
    upstream="the name is written into the call; no issue is known",
    until="verl passes override_config.attn_implementation on",
    needed=False,
)
LAYERS = Patch(
    replaces="verl.models.transformers.monkey_patch:apply_monkey_patch",
    sha256={"0.9.1": "bf01c8cab971780e6eb708d6271a911301b8fb35d41c6cf42108fa3934c6903e"},
    by=apply_monkey_patch,
    symptom="packed batches of Qwen2.5-VL need flash-attn whatever override_config.attn_implementation says",
    upstream="its attention calls flash-attn alone; no issue is known",
    until="verl's attention of Qwen2.5-VL reads the name",
    needed=False,
)
PATCHES = (CONFIGURATION, VALUE_HEAD, LAYERS)

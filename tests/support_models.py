# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Models and values that rows of the table of support refuse."""

from typing import Any

from jetrl_verl.config.support.row import Row

_VALUES_OF = {
    "train": ("bf16",),
    "rollout": ("bf16",),
    "scale_rule": ("pow2",),
    "backward": ("bf16",),
    "unfit_layers": ("skip",),
    "operations": ("stock", "shared"),
    "int8_scales": ("first",),
    "clip": ("calibrated",),
    "correction": ("adaptive",),
    "old_log_probs": ("rollout",),
    "kv_cache": ("fp8",),
    "invariant_scaling": (1.5,),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (1024,),
    "actor_rollout_ref.model.override_config": ({"rope_parameters": {"rope_type": "yarn"}},),
}
_VALUES = (True, 2, None, False, "another", "0.5_2.0", "fp16", "fsdp", "qurl_acr", "bypass_mode", "remax")


def refused_value(row: Row, key: str) -> Any:
    """A value of a setting that a row refuses; of an option of ours one that exists."""
    candidates = _VALUES_OF.get(key.removeprefix("jetrl."), _VALUES)
    return next(value for value in candidates if row.settings[key].test(value))


MODEL_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "vocab_size": 128,
}
"""No row applies to it."""

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [],
}
HYBRID = {
    "model_type": "qwen3_5",
    "text_config": MODEL_CONFIG
    | {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
}
MODELS = {
    "quantized_checkpoint": {"quantization_config": {"quant_method": "fp8"}},
    "model_type": {"model_type": "mixtral"},
    "fields_of_vllm": {"is_causal": False},
    "layer_shape": {"intermediate_size": 576},
    "qwen2_head_dim": {"model_type": "qwen2"},
    "dense_layers_of_a_mixture": MIXTURE | {"mlp_only_layers": [0]},
    "shared_expert": MIXTURE | {"shared_expert_intermediate_size": 128},
    "expert_activation": MIXTURE | {"hidden_act": "gelu"},
    "experts_a_token": MIXTURE | {"num_experts_per_tok": 5},
    "expert_shape": MIXTURE | {"moe_intermediate_size": 192},
    "tied_in_one_part": HYBRID | {"tie_word_embeddings": True},
    "delta_net_heads": HYBRID | {"text_config": HYBRID["text_config"] | {"linear_num_value_heads": 3}},
    "delta_net_shape": HYBRID | {"text_config": HYBRID["text_config"] | {"linear_conv_kernel_dim": 3}},
    "built_in_biases": {"model_type": "seed_oss", "attention_bias": False},
    "head_dim": {"head_dim": 192},
    "rope_type": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "partial_rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "activation": {"hidden_act": "gelu"},
    "sliding_window": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    "soft_cap": {"final_logit_softcapping": 30.0},
    "logit_scale": {"logit_scale": 0.5},
    "attention_dropout": {"attention_dropout": 0.1},
    "residual_dropout": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.1},
}
"""Name of a row -> fields that trigger it, added to ``MODEL_CONFIG``."""

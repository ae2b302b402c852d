# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf in a weight are named at the weight sync, and are not saved."""

import pytest
import torch
from streams import stacked
from tiny_models import tiny_model

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.sync.finite import NonFiniteWeightError, refuse_to_save_non_finite
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.train.weight_stream import sync_parts


def policy():
    return tiny_model("qwen3", hidden_size=128, intermediate_size=256)


def check(weights, plans) -> None:
    assert list(sync_parts(quantize_stream(weights, plans, "fp32"), None))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.post_attention_layernorm.weight"]
)
def test_a_nan_weight_in_a_stack_is_named(name):
    model = policy()
    plans = plan_linears(model.config)
    for planned in (plans, {}):
        check(stacked(model), planned)
    dict(model.named_parameters())[name].data.view(-1)[-3] = float("nan")
    for planned in (plans, {}):
        with pytest.raises(NonFiniteWeightError, match=f"weight sync: {name} of the trainer has NaN"):
            check(stacked(model), planned)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_one_non_finite_weight_is_named_at_the_sync(name, value):
    model = policy()
    plans = plan_linears(model.config)
    with torch.no_grad():
        parameter = dict(model.named_parameters())[name]
        parameter.view(-1)[parameter.numel() // 2 + 3] = value
    with pytest.raises(NonFiniteWeightError, match=f"weight sync: {name} of the trainer has NaN or Inf"):
        check(model.state_dict().items(), plans)


def test_a_non_finite_weight_is_not_saved():
    model = policy()
    refuse_to_save_non_finite(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 4] = float("inf")
    with pytest.raises(NonFiniteWeightError, match="checkpoint: model.layers.0.self_attn.k_proj.weight of the trainer"):
        refuse_to_save_non_finite(model)

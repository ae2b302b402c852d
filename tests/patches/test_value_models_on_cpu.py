# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A critic is loaded with the attention that its configuration names; flash-attn stays verl's default."""

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForTokenClassification

from jetrl_verl.patches.attention_of_value_models import NAMED_ATTENTION


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_a_critic_has_the_attention_of_its_configuration(cpu_platform, monkeypatch, tmp_path, attention):
    from verl.utils import model as verl_model

    NAMED_ATTENTION.apply()
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = tiny_config("qwen3", num_labels=1)
    config._attn_implementation_internal = attention
    asked = []
    load = AutoModelForTokenClassification.from_pretrained

    def loaded(*args, **kwargs):
        asked.append(kwargs.pop("attn_implementation"))
        return load(*args, attn_implementation="sdpa", **kwargs)

    monkeypatch.setattr(AutoModelForTokenClassification, "from_pretrained", loaded)
    critic = verl_model.load_valuehead_model(str(tmp_path), torch.float32, config, False)
    assert asked == [attention]
    assert critic.score.weight.shape == (1, config.hidden_size)

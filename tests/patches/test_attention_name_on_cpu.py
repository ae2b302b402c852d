# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl passes the name of the plugin's attention to policy and critic and writes it into no configuration."""

import pytest
import torch
from patch_home import current
from tiny_models import tiny_config, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jetrl_verl.patches.attention_name import CONFIGURATION, JETRL_ATTENTION, VALUE_HEAD


@pytest.fixture(autouse=True)
def applied():
    for patch in (CONFIGURATION, VALUE_HEAD):
        patch.apply()


@pytest.fixture
def registered(monkeypatch):
    """Register the name, as verl's engine would."""
    monkeypatch.setitem(AttentionInterface._global_mapping, JETRL_ATTENTION, sdpa_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, JETRL_ATTENTION, lambda **_: None)


@pytest.mark.parametrize(("name", "written"), [(JETRL_ATTENTION, False), ("sdpa", True), ("flash_attention_2", True)])
def test_only_the_plugins_attention_name_stays_out_of_the_configuration(name, written):
    config = tiny_config("qwen3")
    current(CONFIGURATION)(config, {"attn_implementation": name, "hidden_size": 8, "rope_parameters": {}})
    assert hasattr(config, "attn_implementation") == written and config.hidden_size == 8
    hybrid = tiny_config("qwen3_5")
    current(CONFIGURATION)(hybrid, {"attn_implementation": name})
    assert (hybrid.vision_config._attn_implementation == "sdpa") != written, "its tower attends in both directions"


def test_a_critic_gets_the_requested_attention(tmp_path, registered):
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = tiny_config("qwen3", attn_implementation=JETRL_ATTENTION, num_labels=1)
    critic = current(VALUE_HEAD)(str(tmp_path), torch.float32, config, False)
    assert type(critic).__name__ == "Qwen3ForTokenClassification"
    assert critic.config._attn_implementation == JETRL_ATTENTION and critic.dtype == torch.float32


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_other_attention_names_reach_a_critic_unchanged(tmp_path, monkeypatch, attention):
    from transformers import AutoModelForTokenClassification

    requested = []
    config = tiny_config("qwen3", num_labels=1)
    config._attn_implementation_internal = attention
    monkeypatch.setattr(
        AutoModelForTokenClassification,
        "from_pretrained",
        lambda *_, **call: requested.append(call["attn_implementation"]),
    )
    current(VALUE_HEAD)(str(tmp_path), torch.float32, config, False)
    assert requested == [attention]

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl hands the name of our attention on, to a critic too, and writes it into no configuration; others it does not
treat differently.
"""

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
    """The name, for a process in which no engine of verl is."""
    monkeypatch.setitem(AttentionInterface._global_mapping, JETRL_ATTENTION, sdpa_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, JETRL_ATTENTION, lambda **_: None)


@pytest.mark.parametrize(("name", "written"), [(JETRL_ATTENTION, False), ("sdpa", True), ("flash_attention_2", True)])
def test_the_name_is_no_field_of_the_configuration(name, written):
    config = tiny_config("qwen3")
    current(CONFIGURATION)(config, {"attn_implementation": name, "hidden_size": 8, "rope_parameters": {}})
    assert hasattr(config, "attn_implementation") == written and config.hidden_size == 8


def test_a_critic_gets_the_attention_that_was_asked_for(tmp_path, registered):
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = tiny_config("qwen3", attn_implementation=JETRL_ATTENTION, num_labels=1)
    critic = current(VALUE_HEAD)(str(tmp_path), torch.float32, config, False)
    assert type(critic).__name__ == "Qwen3ForTokenClassification"
    assert critic.config._attn_implementation == JETRL_ATTENTION and critic.dtype == torch.float32


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_another_name_reaches_a_critic_as_it_is(tmp_path, monkeypatch, attention):
    from transformers import AutoModelForTokenClassification

    asked = []
    config = tiny_config("qwen3", num_labels=1)
    config._attn_implementation_internal = attention
    monkeypatch.setattr(
        AutoModelForTokenClassification,
        "from_pretrained",
        lambda *_, **call: asked.append(call["attn_implementation"]),
    )
    current(VALUE_HEAD)(str(tmp_path), torch.float32, config, False)
    assert asked == [attention]

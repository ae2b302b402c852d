# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl passes the name of the plugin's attention to policy and critic and writes it into no configuration."""

import pytest
import torch
from patch_home import current
from tiny_models import tiny_config, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jetrl_verl.patches.attention_name import CONFIGURATION, JETRL_ATTENTION, LAYERS, VALUE_HEAD


@pytest.fixture(autouse=True)
def applied():
    for patch in (CONFIGURATION, VALUE_HEAD, LAYERS):
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


def test_packed_sequences_of_qwen2_5_vl_attend_by_the_requested_name(monkeypatch):
    """verl's forward of its attention calls flash-attn, which is not here."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as of_2_5
    from transformers.models.qwen2_vl import modeling_qwen2_vl as of_2

    for name in ("Attention", "Model", "ForConditionalGeneration"):
        for cls in (getattr(of_2_5, f"Qwen2_5_VL{name}"), getattr(of_2, f"Qwen2VL{name}")):
            monkeypatch.setattr(cls, "forward", cls.forward)  # verl assigns them
    model = tiny_model("qwen2_5_vl", attn_implementation="sdpa")
    current(LAYERS)(model, use_remove_padding=True)
    assert of_2_5.Qwen2_5_VLAttention.forward.__module__.startswith("verl."), "the class has verl's"
    embeddings = torch.randn(1, 12, 256)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 1, 12)
    packed, first, second = (
        model.model.language_model(
            inputs_embeds=embeddings[:, part], position_ids=positions[..., part], use_cache=False
        )[0]
        for part in (slice(0, 12), slice(0, 5), slice(5, 12))
    )
    torch.testing.assert_close(packed, torch.cat([first, second], dim=1))

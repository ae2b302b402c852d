# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the driver learns of plugins that replaced something in vLLM, through the program and its parts."""

from types import SimpleNamespace

import pytest

from jetrl_verl.config import vllm_plugins
from jetrl_verl.rollout import replaced
from jetrl_verl.rollout import vllm_compat as vllm


class RMSNorm(vllm.RMSNorm):
    """Another package's."""


def names(architecture: str = "Qwen3ForCausalLM") -> list[str]:
    return list(replaced.replacements(architecture))


def test_a_vllm_without_other_plugins_is_its_own():
    assert names() == names("LlamaForCausalLM") == names("NoSuchModel") == []


def test_what_a_plugin_replaced_is_named(monkeypatch):
    from vllm.model_executor.layers import layernorm

    other = f"the layer {__name__}.RMSNorm instead of RMSNorm"
    with monkeypatch.context() as patched:
        patched.setitem(vllm.op_registry_oot, "RMSNorm", RMSNorm)
        assert names() == [other]
    with monkeypatch.context() as patched:
        patched.setattr(layernorm, "RMSNorm", RMSNorm)
        assert names() == [other]
    with monkeypatch.context() as patched:
        model = SimpleNamespace(load_model_cls=lambda: RMSNorm)
        patched.setitem(vllm.ModelRegistry.models, "Qwen3ForCausalLM", model)
        assert names() == [f"the model {__name__}.RMSNorm as Qwen3ForCausalLM"] and names("LlamaForCausalLM") == []
    with monkeypatch.context() as patched:
        patched.setattr(type(vllm.current_platform), "is_out_of_tree", lambda self: True)
        assert names() == [f"the platform {type(vllm.current_platform).__module__}"]
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(vllm.AttentionBackendEnum.CPU_ATTN, "package.Backend")
    assert names() == ["the attention backend package.Backend as CPU_ATTN"]
    vllm.AttentionBackendEnum.CPU_ATTN.clear_override()


@pytest.mark.parametrize("chosen", [None, "jetrl", "jetrl, norms"])
def test_plugins_of_other_packages_are_those_that_vllm_loads(monkeypatch, chosen):
    def entry_points(group):
        names = [("jetrl", "jetrl-verl"), ("lora", "vllm"), ("norms", "other")] if "general" in group else []
        return [SimpleNamespace(name=name, dist=SimpleNamespace(name=dist)) for name, dist in names]

    monkeypatch.setattr(vllm_plugins.metadata, "entry_points", entry_points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    assert vllm_plugins.other_plugins() == (() if chosen == "jetrl" else ("norms",))


def test_the_program_answers_in_a_process_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(vllm_plugins, "other_plugins", lambda: ("norms",))
    vllm_plugins.replaced.cache_clear()
    assert vllm_plugins.replaced("Qwen3ForCausalLM") == () and not capsys.readouterr().err
    vllm_plugins.replaced.cache_clear()
    monkeypatch.setattr(vllm_plugins, "_PROGRAM", "no.such.program")
    assert vllm_plugins.replaced("Qwen3ForCausalLM") == ()
    assert "what the vLLM plugins norms replace is not known (CalledProcessError" in capsys.readouterr().err
    vllm_plugins.replaced.cache_clear()

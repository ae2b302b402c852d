# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Invariant scaling keeps the model's function up to rounding, and can be undone."""

import json

import pytest
import torch
from tiny_models import ALL, HYBRIDS, tiny_model
from transformers import AutoModelForCausalLM

from jetrl_verl.algorithms.invariant_scaling import FOLDED, check_resumed, fold, fold_missing, folded_in, unfolded
from jetrl_verl.config.support.row import UnsupportedConfiguration
from jetrl_verl.models import UnsupportedLayer
from jetrl_verl.models import family as model_family

S = 1.5
QWEN3 = model_family({"model_type": "qwen3"})
NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def with_trained_norms(family: str):
    """Norm weights away from 1, as after training."""
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model


def logits(model, dtype: torch.dtype) -> torch.Tensor:
    tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.to(dtype)(tokens, use_cache=False).logits.float()


@pytest.mark.parametrize("family", ALL)
def test_the_function_is_unchanged_in_fp32(family):
    model = with_trained_norms(family)
    before = logits(model, torch.float32)
    changed = fold(model.named_parameters(), S, model_family({"model_type": family}))
    # A mixture's second norm also feeds the router, so it is not scaled.
    per_layer = 1 + 3 if family == "qwen3_moe" else len(NORMS) + len(PROJECTIONS)
    # A delta net has four input projections.
    of_hybrid = 2 * 5 + 4 if family == "qwen3_5_moe" else 2 * 8 + 7
    assert len(changed) == (of_hybrid if family in HYBRIDS else 2 * per_layer)
    rounding = 4e-6 if family in HYBRIDS else 2e-6  # a hybrid has a layer more, and recurrent sums
    assert (logits(model, torch.float32) - before).norm() < rounding * before.norm()


@pytest.mark.parametrize("family", ALL)
def test_unfolding_returns_the_master_weights(family):
    model = with_trained_norms(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    touched = set(fold(model.named_parameters(), S, model_family({"model_type": family})))
    restored = dict(unfolded(model.state_dict().items(), S, model_family({"model_type": family})))
    assert list(restored) == list(before)
    for name, tensor in before.items():
        rounded = tensor.abs() + 1 if family in HYBRIDS and "norm" in name else tensor.abs()
        ulp = (torch.nextafter(rounded, torch.tensor(torch.inf)) - rounded) if name in touched else 0
        assert ((restored[name] - tensor).abs() <= ulp).all(), name
        assert restored[name].dtype == tensor.dtype


def test_fold_accepts_a_state_dict_and_meta_tensors():
    model = with_trained_norms("llama")
    llama = model_family({"model_type": "llama"})
    assert fold(model.state_dict().items(), S, llama) == fold(model.to("meta").named_parameters(), S, llama)


def test_a_model_with_other_norms_is_refused():
    parameters = [(n, p) for n, p in tiny_model("llama").named_parameters() if "1.post_attention_layernorm" not in n]
    before = [p.clone() for _, p in parameters]
    with pytest.raises(UnsupportedLayer, match=r"model\.layers\.1 has no post_attention_layernorm"):
        fold(parameters, S, model_family({"model_type": "llama"}))
    assert all(torch.equal(old, p) for old, (_, p) in zip(before, parameters, strict=True)), "half of it was scaled"


@pytest.mark.parametrize(("first", "second"), [(S, S), (S, 3.0), (S, 1.0), (1.0, S), (1.0, 1.0)])
def test_a_model_with_a_factor_is_scaled_by_the_missing_rest(first, second, tmp_path):
    """The second training stage starts from the folder of the first."""
    model = with_trained_norms("qwen3")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if second != 1:
        fold(expected.items(), second, QWEN3)
    fold_missing(model, first)
    model.save_pretrained(tmp_path)
    later = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert folded_in(later.config) == first
    fold_missing(later, second)
    assert folded_in(later.config) == second
    for name, tensor in later.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=3e-7, atol=0)


def test_the_remedy_for_a_mismatched_factor_works(tmp_path):
    """A checkpoint with 2.25, of a run that folded 1.5 twice; the run starts from the first stage's folder."""
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text(json.dumps({FOLDED: 2.25}))
    model = tiny_model("qwen3")
    fold_missing(model, S)
    with pytest.raises(UnsupportedConfiguration, match=r"with jetrl.invariant_scaling=1\.5: .* Set .*=2\.25"):
        check_resumed(tmp_path, folded_in(model.config))
    fold_missing(model, 2.25)
    check_resumed(tmp_path, folded_in(model.config))

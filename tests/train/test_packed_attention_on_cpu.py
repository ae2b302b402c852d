# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation=jetrl_varlen`` on packed and padded batches, and what it refuses; also how stock transformers
reads packed batches."""

from functools import partial

import pytest
import reference_operations as reference
import torch
from attention_cases import FORMS, LENGTHS, Attention, attended, operands
from tiny_models import FAMILIES, packed, padded, sequences_of, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.train import varlen_attention
from jetrl_verl.train.packing import Packing
from jetrl_verl.train.register import register

register()

CHANGES = {"mistral": dict(sliding_window=None)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (3, 1, 40)])
def test_values_and_gradients_are_those_of_the_formula(heads, kv_heads, head_dim, form):
    inputs = [x.requires_grad_() for x in operands(heads, kv_heads, head_dim)]
    exact = [x.detach().clone().requires_grad_() for x in inputs]
    out = attended(form, *inputs, scaling=0.2)
    expected = reference.attention_by_formula(*exact, LENGTHS, 0.2)
    gradient = operands(heads, kv_heads, head_dim, seed=1)[0]
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for x, exact_x in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad, exact_x.grad, rtol=0, atol=1e-11)


tokens = partial(sequences_of, LENGTHS)


def model(family: str, attention: str = JETRL_ATTENTION, **changes):
    return tiny_model(family, attn_implementation=attention, **CHANGES.get(family, {}), **changes)


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, JETRL_ATTENTION) for family in FAMILIES), ("qwen3", "sdpa"), ("qwen3", "eager")],
)
def test_packed_and_padded_logits_are_those_of_each_sequence_alone(family, attention):
    """Also with transformers' own, which reads packed sequences from positions and builds a mask ``[T, T]``."""
    decoder, sequences = model(family, attention), tokens()
    batch = padded(sequences)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        alone = torch.cat([model(family, "eager")(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
        torch.testing.assert_close(decoder(**packed(sequences), use_cache=False).logits[0], alone, rtol=0, atol=3e-6)
        torch.testing.assert_close(decoder(**batch, use_cache=False).logits[real], alone, rtol=0, atol=3e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_padded_stock_model(checkpointing):
    def gradients(model: nn.Module, batch: dict, real) -> dict[str, torch.Tensor]:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        logits = model(**batch, use_cache=False).logits[real]
        logits.log_softmax(-1)[:, 3].sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    batch = padded(tokens())
    real = batch["attention_mask"].bool()
    packed_gradients = gradients(model("qwen3"), packed(tokens()), torch.ones(1, sum(LENGTHS), dtype=torch.bool))
    for name, gradient in gradients(model("qwen3", "sdpa"), batch, real).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_packing_is_computed_once_a_pass_even_with_recomputed_layers(monkeypatch, form):
    calls = []
    monkeypatch.setattr(
        varlen_attention.Packing, "of", lambda *call, of=Packing.of: calls.append(of(*call)) or calls[-1]
    )
    decoder = model("qwen3", num_hidden_layers=5)
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    decoder.train()
    for count in (1, 2):
        batch = (packed if form == "packed" else padded)(tokens())
        decoder(**batch, use_cache=False).logits.sum().backward()
        assert len(calls) == count
    assert calls[0].cu_seqlens.tolist() == [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def test_positions_changed_in_place_are_read_again():
    decoder, batch = model("qwen3"), packed([torch.arange(12)])
    with torch.no_grad():
        whole = decoder(**batch, use_cache=False).logits
        batch["position_ids"][0, 5:] -= 5
        parts = decoder(**batch, use_cache=False).logits
        assert torch.equal(parts, decoder(**packed([torch.arange(5), torch.arange(5, 12)]), use_cache=False).logits)
    assert not torch.allclose(parts, whole)
    with torch.inference_mode():
        assert torch.equal(decoder(**packed([torch.arange(12)]), use_cache=False).logits, whole)


def test_varlen_attention_builds_no_mask():
    sequences = tokens()
    batch, positions = padded(sequences), packed(sequences)["position_ids"]
    for mask, position_ids in ((None, positions), (batch["attention_mask"], batch["position_ids"])):
        arguments = dict(
            inputs_embeds=torch.zeros(*position_ids.shape, 8),
            attention_mask=mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        stock = create_causal_mask(tiny_config("qwen3", attn_implementation="sdpa"), **arguments)
        assert stock.shape[-2:] == 2 * position_ids.shape[1:]
        varlen = create_causal_mask(tiny_config("qwen3", attn_implementation=JETRL_ATTENTION), **arguments)
        assert varlen is None if mask is None else torch.equal(varlen, batch["attention_mask"].bool())


def config(**changes):
    return tiny_config("qwen3", attn_implementation=JETRL_ATTENTION, **changes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(dropout=0.1), "with attention_dropout=0.1 .*: its backward has none. Set .*attention_dropout=0"),
        (dict(sliding_window=64), "whose layers attend to windows, .* whole sequences. Set actor_rollout_ref.*=sdpa"),
        (dict(softcap=30.0), "soft-capped scores or attention sinks"),
        (dict(s_aux=torch.zeros(2)), "soft-capped scores or attention sinks"),
        (dict(is_causal=False), "attention in both directions"),
        (dict(prefix_grouper=object()), "a prefix grouper"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_attention_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=f"{sentence}|{sentence} is not supported with attn_implementation=jetrl"):
        attended("packed", *operands(2, 1, 8), **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(position_ids=None), "a model that does not pass its positions on"),
        (dict(position_ids=torch.zeros(3, 1, 4, dtype=torch.int64)), "positions of more than one dimension"),
        (dict(attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)), "a mask other than the causal one"),
        (dict(key=torch.zeros(1, 2, 9, 8)), "a cache of keys and values"),
        (dict(value=torch.zeros(1, 2, 4, 16)), "queries, keys and values of 8, 8 and 16 features per head"),
    ],
)
def test_a_call_without_the_bounds_of_sequences_is_refused(change, sentence):
    call = dict(query=torch.zeros(1, 2, 4, 8), position_ids=torch.arange(4)[None], attention_mask=None)
    call |= dict(key=call["query"], value=call["query"]) | change
    with pytest.raises(ValueError, match=f"{sentence} is not supported with attn_implementation=jetrl_varlen: "):
        varlen_attention.attend(Attention(), **call)


def test_masks_that_are_not_causal_within_sequences_are_refused():
    arguments = dict(inputs_embeds=torch.zeros(1, 6, 8), attention_mask=None, past_key_values=None)
    with pytest.raises(ValueError, match="a mask other than the causal one is not supported with attn_implementation"):
        create_sliding_window_causal_mask(config(use_sliding_window=True, sliding_window=2), **arguments)
    with pytest.raises(ValueError, match="a mask other than the causal one"):
        create_causal_mask(config(), **arguments, or_mask_function=lambda b, h, q, k: q >= 0)
    with pytest.raises(ValueError, match="a mask other than the causal one"):
        create_causal_mask(config(attention_chunk_size=2), **arguments)
    bidirectional = model("qwen3")
    bidirectional.config.is_causal = False
    with pytest.raises(ValueError, match="attention in both directions is not supported"):
        bidirectional(**packed(tokens()), use_cache=False)
    sliding = model("qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="whose layers attend to windows, is not supported"):
        sliding(**packed(tokens()), use_cache=False)


def test_generation_is_refused():
    decoder = model("qwen3")
    with torch.no_grad(), pytest.raises(ValueError, match="a cache of keys and values .* Set use_cache=False"):
        decoder.generate(torch.arange(5)[None], attention_mask=torch.ones(1, 5), max_new_tokens=3, do_sample=False)


def test_a_saved_folder_names_no_attention(tmp_path):
    """Also with the field that verl writes into a configuration."""
    import verl.utils.model

    from jetrl_verl.patches.attention_name import CONFIGURATION

    CONFIGURATION.apply()
    decoder = model("qwen3")
    verl.utils.model.update_model_config(decoder.config, {"attn_implementation": JETRL_ATTENTION, "rope_theta": 1e6})
    decoder.save_pretrained(tmp_path)
    assert all("jetrl" not in file.read_text() for file in tmp_path.glob("*.json"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the trainer exports and how it masks logits, without FSDP."""

from types import SimpleNamespace
from unittest import mock

import torch
from tiny_models import tiny_model

from jetrl_verl.models.plan import plan_linears
from jetrl_verl.nn.chunked_logits import used_vocabulary
from jetrl_verl.reference import quantize_int8
from jetrl_verl.sync.quantize import quantize_stream
from jetrl_verl.train.features import MaskedVocabulary


def test_an_all_zero_row_gets_its_kept_scale_once_it_is_not_zero():
    """It is zero or too small at the first sync; other rows keep their scales while weights change."""
    plans = plan_linears(tiny_model("qwen3").config, format_name="int8")
    name = "model.layers.0.mlp.down_proj.weight"
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5] = 0, 2.0**-80
    kept: dict[str, torch.Tensor] = {}

    def sync() -> tuple[torch.Tensor, torch.Tensor]:
        ((_, (qdata, scales)),) = quantize_stream([(name, weight)], plans, "fp32", kept)
        assert torch.equal(qdata, quantize_int8(weight.bfloat16(), scales).qdata)
        return qdata, scales

    qdata, first = sync()
    assert torch.equal(qdata, quantize_int8(weight.bfloat16()).qdata)
    assert torch.equal(first, quantize_int8(weight.bfloat16()).scales)
    weight[4] *= 2
    assert torch.equal(sync()[1], first)
    weight[3], weight[5] = 1e-3, torch.linspace(-0.02, 0.02, 384)
    qdata, second = sync()
    empty = torch.zeros(256, 1, dtype=torch.bool)
    empty[3] = empty[5] = True
    assert torch.equal(second, torch.where(empty, quantize_int8(weight.bfloat16()).scales, first))
    assert qdata[3].min() == 127 and qdata[5].abs().max() == 127
    weight[3] *= 3
    weight[7] = 0
    assert torch.equal(sync()[1], second), "set once, and kept by a row that becomes zero"


def test_unused_vocabulary_has_no_probability_and_entropy_is_finite():
    model = tiny_model("qwen3", vocab_size=80)
    tokens = torch.arange(10)[None]
    before = model(tokens).logits
    processor = SimpleNamespace(image_token_id=68, video_token_id=69)
    configured = SimpleNamespace(tokenizer=range(70), processor=processor, use_fused_kernels=False)
    engine = SimpleNamespace(engine_config=mock.MagicMock(), model_config=configured)
    MaskedVocabulary(engine).install(model)
    assert used_vocabulary(model) == (70, (68, 69))
    logits = model(tokens).logits
    assert torch.equal(logits[..., :68], before[..., :68])
    probabilities = logits.softmax(-1)
    assert torch.equal(probabilities[..., 68:], torch.zeros_like(probabilities[..., 68:]))
    for temperature in (1.0, 0.6):
        scaled = (logits / temperature).to(torch.bfloat16)
        entropy = torch.logsumexp(scaled, -1) - (scaled.softmax(-1) * scaled).sum(-1)
        assert entropy.isfinite().all()
    logits[..., :70].logsumexp(-1).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

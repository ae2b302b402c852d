# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation=jetrl_varlen`` on a GPU: packed and padded batches against torch's sdpa in FP32, and a whole
model, whose layers wait for the device once per pass."""

import pytest
import reference_operations as reference
import torch
from attention_cases import FORMS, LENGTHS, attended, operands
from tiny_models import tiny_model

from jetrl_verl.patches.attention_name import JETRL_ATTENTION
from jetrl_verl.train.register import register

BF16_STEP = 2**-8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (2, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_and_gradients(head_dim, heads, kv_heads, form):
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in operands(heads, kv_heads, head_dim)]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    out, want = attended(form, *leaves), reference.attention(*exact, cu, head_dim**-0.5)
    gradient = operands(heads, kv_heads, head_dim, seed=1)[0].to("cuda", torch.bfloat16)
    out.backward(gradient)
    want.backward(gradient.float())
    assert (out.float() - want).norm() <= BF16_STEP * want.norm()
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        assert (leaf.grad.float() - exact_leaf.grad).norm() <= 2 * BF16_STEP * exact_leaf.grad.norm()


def test_fp32_queries_are_cast_under_autocast():
    q, k, v = (x.to("cuda", torch.float32) for x in operands(4, 2, 128))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attended("packed", q, k, v)
    assert out.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="operands in torch.float32.* is not supported with .*jetrl_varlen: "):
        attended("packed", q, k, v)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_logits_are_those_of_each_sequence_alone(head_dim):
    """Its layers wait for the device once per pass: a model with more layers waits as often."""
    register()
    sequences = [torch.randint(0, 64, (n,), device="cuda") for n in LENGTHS]
    inputs = dict(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n, device="cuda") for n in LENGTHS])[None],
    )

    def build(layers: int):
        options = dict(head_dim=head_dim, num_hidden_layers=layers, attn_implementation=JETRL_ATTENTION)
        return tiny_model("qwen3", **options).to("cuda", torch.bfloat16)

    def waits(model) -> int:
        inputs["position_ids"] = inputs["position_ids"].clone()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
            model(**inputs, use_cache=False)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense")

    model = build(2)
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[0].float()
        alone = torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in sequences]).float()
    assert (packed - alone).norm() <= 4 * BF16_STEP * alone.norm()
    assert waits(model) == waits(build(6))

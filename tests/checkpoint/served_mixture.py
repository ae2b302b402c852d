# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts whose blocks have scales unlike each other's, and whether an engine serves its FP8 export.

What an engine should say of a prompt is Hugging Face's model in FP32 with the weights that the export holds. It may be
as far from that as activations in FP8 and a router in BF16 take it, a fifth of what scales in wrong places do on a CPU.
"""

import copy

import torch
from tiny_models import tiny_model, with_preferences

from jetrl_verl import formats
from jetrl_verl.formats.format import SCALE_SUFFIX
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.sync.wire import quantize_stream

RULE, PROMPT = "fp32", list(range(3, 60))
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MISPLACED = {
    "of the next expert": lambda scales: scales.roll(1, 0),
    "of the next 128 rows": lambda scales: scales.roll(1, 1),
    "of the next 128 columns": lambda scales: scales.roll(1, 2),
    "of the block across the diagonal": lambda scales: scales.transpose(1, 2).reshape(scales.shape),
}


def policy():
    """Two layers of eight experts, two a token, blocks of theirs up to eight times as large as others."""
    sizes = dict(hidden_size=512, num_attention_heads=4, moe_intermediate_size=256)
    model = with_preferences(tiny_model("qwen3_moe", 2, **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(EXPERTS):
                blocks = parameter.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
                exponents = torch.rand(*blocks.shape[:2], blocks.shape[3], generator=generator) * 3 - 1.5
                blocks.mul_(torch.exp2(exponents)[:, :, None, :, None])
    return model


def quantized(model) -> dict[str, QuantizedTensor]:
    """Name -> what the export holds of a weight in FP8."""
    sent = dict(quantize_stream(model.state_dict().items(), plan_linears(model.config), RULE))
    return {
        name.removesuffix(SCALE_SUFFIX): QuantizedTensor(sent[name.removesuffix(SCALE_SUFFIX)], scales)
        for name, scales in sent.items()
        if name.endswith(SCALE_SUFFIX)
    }


def log_probs(model, misplaced=None) -> torch.Tensor:
    """Of the prompt from its second token on, ``[len(PROMPT) - 1]``: FP8 weights, the experts' scales misplaced."""
    served, flow = copy.deepcopy(model).bfloat16().float(), formats.get(formats.FLOW)
    for name, weight in quantized(model).items():
        if misplaced is not None and name.endswith(EXPERTS):
            weight = QuantizedTensor(weight.qdata, misplaced(weight.scales))
        served.get_parameter(name).data.copy_(flow.dequantize_weight(weight))
    with torch.no_grad():
        logits = served(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def check_served(model, theirs: torch.Tensor) -> None:
    """Assert that an engine's log-probabilities of the prompt are those of the policy in FP8."""
    right = log_probs(model)
    distance = (theirs - right).abs().mean().item()
    wrong = {what: (log_probs(model, misplaced) - right).abs().mean().item() for what, misplaced in MISPLACED.items()}
    print(f"|theirs - right| {distance:.2e}; with scales", *(f"{what} {far:.2e}" for what, far in wrong.items()))
    assert distance < 0.5 * min(wrong.values()), (distance, wrong)

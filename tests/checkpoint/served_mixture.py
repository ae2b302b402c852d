# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture whose blocks have different scales, and a check that an engine serves its FP8 export correctly.

The reference is Hugging Face's model in FP32 with the dequantized weights. FP8 activations and a BF16 router move an
engine's log-probabilities a fifth as far as misplaced scales do (CPU).
"""

import copy

import torch
from tiny_models import tiny_model, with_preferences
from vllm_engine import model_log_probs

from jetrl_verl import formats
from jetrl_verl.formats.format import QuantizedWeight
from jetrl_verl.models.plan import plan_linears
from jetrl_verl.reference import BLOCK, QuantizedTensor
from jetrl_verl.sync.quantize import quantize_stream

RULE, PROMPT = "fp32", list(range(3, 60))
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MISPLACED = {
    "of the next expert": lambda scales: scales.roll(1, 0),
    "of the next 128 rows": lambda scales: scales.roll(1, 1),
    "of the next 128 columns": lambda scales: scales.roll(1, 2),
    "of the transposed block": lambda scales: scales.transpose(1, 2).reshape(scales.shape),
}


def policy(family: str = "qwen3_moe", **changes):
    """Layers of eight experts, top 2; blocks differ in size by up to a factor of eight."""
    sizes = dict(hidden_size=512, num_attention_heads=4, moe_intermediate_size=256)
    model = with_preferences(tiny_model(family, 2, **sizes, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(EXPERTS):
                blocks = parameter.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
                exponents = torch.rand(*blocks.shape[:2], blocks.shape[3], generator=generator) * 3 - 1.5
                blocks.mul_(torch.exp2(exponents)[:, :, None, :, None])
    return model


def quantized(model) -> dict[str, QuantizedWeight]:
    """The exported FP8 weights by name."""
    sent = quantize_stream(model.state_dict().items(), plan_linears(model.config), RULE)
    return {name: weight for name, weight in sent if isinstance(weight, QuantizedWeight)}


def log_probs(model, misplaced=None) -> torch.Tensor:
    """Log-probabilities ``[len(PROMPT) - 1]`` of the prompt under FP8 weights, with the experts' scales misplaced."""
    served, flow = copy.deepcopy(model).bfloat16().float(), formats.get(formats.FLOW)
    for name, weight in quantized(model).items():
        if misplaced is not None and name.endswith(EXPERTS):
            weight = QuantizedTensor(weight.qdata, misplaced(weight.scales))
        served.get_parameter(name).data.copy_(flow.dequantize_weight(weight))
    return model_log_probs(served, PROMPT)


def check_served(model, engine: torch.Tensor) -> None:
    """Assert that an engine's log-probabilities of the prompt match the policy's in FP8."""
    expected = log_probs(model)
    distance = (engine - expected).abs().mean().item()
    wrong = {
        what: (log_probs(model, misplaced) - expected).abs().mean().item() for what, misplaced in MISPLACED.items()
    }
    print(f"|engine - expected| {distance:.2e}; with scales", *(f"{what} {far:.2e}" for what, far in wrong.items()))
    assert distance < 0.5 * min(wrong.values()), (distance, wrong)

# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an FP8 KV cache does to a policy: log-probabilities and entropy against a BF16 cache, by rule of the scales.

    PYTHONPATH=. python3 benchmarks/kv_cache_accuracy.py --out benchmarks/results/kv_cache_accuracy.json     # minutes
    PYTHONPATH=. python3 benchmarks/kv_cache_accuracy.py MODEL --tokens 16384 --device cuda

Models: MODEL, a Hugging Face folder, or two drawn ones, with norms of queries and keys (Qwen3) and without (Llama).
Each as it is and with outliers that leave its function alone: of every KV head one channel of the keys and one of the
values is 100 times larger, and what reads it 100 times smaller. Sequences are sampled from the model itself.

Rules, all E4M3, keys and values alike:

- *token+head*: a power of two per token and KV head (reference/kv_cache.py).
- *token+head, fp32*: the same groups, ``amax / 448``.
- *head*: one ``amax / 448`` a KV head, over all tokens of the batch: a calibration that could not be better.
- *layer*: one for a layer's keys and one for its values, likewise.
- *1.0*: no scale, which is vLLM's ``kv_cache_dtype=fp8`` without calibration.

For each: RMS, mean and largest error of a token's log-probability, KL by the k3 estimator, the change of the mean
entropy, and the RMS by position. Attention itself is FP32 in all of them.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

from jetrl_verl import reference
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.provenance import provenance

HEAD_DIM, OUTLIER = 128, 100.0
NAME = "kv_cache_accuracy"
DRAWN = dict(
    vocab_size=2000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    max_position_embeddings=16384,
    tie_word_embeddings=False,
)


def by_token_and_head(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_heads(reference.quantize_heads(x))


def by_token_and_head_in_fp32(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_1x128(reference.quantize_1x128(x, "fp32")).to(x.dtype)


def with_scale(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    codes = (x.float() / scale).clamp(-reference.E4M3_MAX, reference.E4M3_MAX).to(reference.FP8_DTYPE)
    return (codes.float() * scale).to(x.dtype)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return with_scale(x, x.abs().float().amax(dim=(0, 2, 3), keepdim=True) / reference.E4M3_MAX)


def by_layer(x: torch.Tensor) -> torch.Tensor:
    return with_scale(x, x.abs().float().amax() / reference.E4M3_MAX)


RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda x: x,
    "token+head": by_token_and_head,
    "token+head, fp32": by_token_and_head_in_fp32,
    "head": by_head,
    "layer": by_layer,
    "1.0": lambda x: with_scale(x, 1.0),
}
"""Name -> what the cache makes of keys or values ``[B, Hkv, T, 128]`` BF16."""

_rule = RULES["bf16"]


def attention(module, query, key, value, attention_mask, scaling, **_):
    """As transformers calls it: causal, FP32, over what the cache gives."""
    key, value = _rule(key), _rule(value)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).to(query.dtype), None


def drawn(kind: type, seed: int) -> PreTrainedModel:
    """A random model that attends to something and prefers something."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**DRAWN))
    larger = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lm_head.weight")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.copy_(1 + torch.rand_like(weight))
            elif name.endswith(larger):
                weight.mul_(2)
    return model


def plant_outliers(model: PreTrainedModel) -> None:
    """In place. Channels i and i + 64 of a head are rotated together, so both are scaled."""
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            attend = layer.self_attn
            channel = 7 + number
            pair = [channel, channel + HEAD_DIM // 2]
            if hasattr(attend, "k_norm"):
                attend.k_norm.weight[pair] *= OUTLIER
                attend.q_norm.weight[pair] /= OUTLIER
            else:
                for projection, factor in ((attend.k_proj, OUTLIER), (attend.q_proj, 1 / OUTLIER)):
                    for parameter in (projection.weight, projection.bias):
                        if parameter is not None:
                            parameter.unflatten(0, (-1, HEAD_DIM))[:, pair] *= factor
            values = [p for p in (attend.v_proj.weight, attend.v_proj.bias) if p is not None]
            for parameter in values:
                parameter.unflatten(0, (-1, HEAD_DIM))[:, channel] *= OUTLIER
            attend.o_proj.weight.unflatten(1, (-1, HEAD_DIM))[:, :, channel] /= OUTLIER


def sample(model: PreTrainedModel, sequences: int, tokens: int) -> torch.Tensor:
    """``[sequences, tokens]`` sampled from the model, behind one random token."""
    torch.manual_seed(0)
    first = torch.randint(0, model.config.vocab_size, (sequences, 1), device=model.device)
    model.set_attn_implementation("sdpa")
    options = dict(max_length=tokens, min_length=tokens, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0)
    return model.generate(first, attention_mask=torch.ones_like(first), **options)


@torch.no_grad()
def look(model: PreTrainedModel, ids: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``[B, T - 1]`` of the tokens and entropies ``[B, T - 1]``, with a cache under ``rule``."""
    global _rule
    _rule = RULES[rule]
    try:
        found = []
        for row in ids.split(1):
            logits = model(input_ids=row, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
            chosen = logits.gather(-1, row[:, 1:, None]).squeeze(-1)
            found.append((chosen, -(logits.exp() * logits).sum(dim=-1)))
    finally:
        _rule = RULES["bf16"]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def measured(exact: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> dict:
    error = (found[0] - exact[0]).double()
    by_position = [part.square().mean().sqrt().item() for part in error.tensor_split(4, dim=1)]
    return {
        "rms": error.square().mean().sqrt().item(),
        "mean": error.mean().item(),
        "largest": error.abs().max().item(),
        "k3": (error.exp() - 1 - error).mean().item(),
        "entropy": (found[1] - exact[1]).double().mean().item(),
        "rms_by_quarter": by_position,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    console = Console(width=150)
    makers = {str(path.name): (lambda path=path: AutoModelForCausalLM.from_pretrained(path)) for path in args.models}
    if not makers:
        makers = {
            "drawn, QK norm": lambda: drawn(Qwen3Config, 1),
            "drawn, no QK norm": lambda: drawn(LlamaConfig, 2),
        }
    facts = {"build": provenance(), "tokens": args.tokens, "sequences": args.sequences, "device": args.device}
    result = Result(args.out, {"command": "kv_cache_accuracy", **facts, "records": []})
    for name, make in makers.items():
        for planted in (False, True):
            model = make()
            if planted:
                plant_outliers(model)
            model = model.to(args.device, torch.bfloat16).eval()
            if not planted:
                ids = sample(model, args.sequences, args.tokens)
            model.set_attn_implementation(NAME)
            exact = look(model, ids, "bf16")
            table = Table("scales", "RMS", "mean", "largest", "k3", "entropy", "RMS by quarter of the positions")
            table.title = f"{name}{', outliers' if planted else ''}: entropy {exact[1].mean().item():.3f}"
            for rule in [rule for rule in RULES if rule != "bf16"]:
                numbers = measured(exact, look(model, ids, rule))
                result["records"].append({"model": name, "outliers": planted, "scales": rule, **numbers})
                quarters = " ".join(f"{rms:.4f}" for rms in numbers["rms_by_quarter"])
                cells = (numbers[key] for key in ("rms", "mean", "largest"))
                table.add_row(
                    rule,
                    *(f"{x:.4f}" for x in cells),
                    f"{numbers['k3']:.1e}",
                    f"{numbers['entropy']:+.4f}",
                    quarters,
                )
            console.print(table)
            result.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

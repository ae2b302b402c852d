# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What an FP8 KV cache does to a policy: log-probabilities and entropy against a BF16 cache, by rule and position.

    PYTHONPATH=. python3 benchmarks/kv_cache_accuracy.py --out benchmarks/results/kv_cache_accuracy.json     # minutes
    PYTHONPATH=. python3 benchmarks/kv_cache_accuracy.py MODEL --tokens 1024 --sequences 16 --device cuda
    PYTHONPATH=. python3 benchmarks/kv_cache_accuracy.py --shape qwen3 --tokens 16384 --sequences 1 --device cuda \\
        --out benchmarks/results/kv_cache_accuracy_h200.json     # 2 minutes on an H200

Models: MODEL, Hugging Face folders (the demo's policy; the study's is ``DIR/policy`` of ``benchmarks.study.warm_up
--out DIR``), or two drawn ones, with norms of queries and keys (Qwen3) and without (Llama): ``--shape small``, or
``qwen3``, which has the heads, widths and vocabulary of Qwen3-1.7B in 8 layers. Each as it is and with outliers that
leave its function alone: of every KV head one channel of the keys and one of the values is 100 times larger, and what
reads them 100 times smaller.

A context is made of pieces that the model sampled, ``--piece`` tokens each, one behind the other. At each of its places
a token is drawn from what the BF16 cache makes of that context, at any length: it is the token's log-probability that
is compared, so the policy is judged on its own samples, and the KL divergence over the whole vocabulary beside it.

Rules, all E4M3:

- *token+head*: a power of two per token and KV head (reference/kv_cache.py).
- *token+head, fp32*: the same groups, ``amax / 448``.
- *head*: one ``amax / 448`` a KV head, over all tokens of the batch: a calibration that could not be better.
- *1.0*: no scale.
- *vLLM, 1.0* and *vLLM, calibrated*: vLLM's ``kv_cache_dtype=fp8`` on Hopper, without calibration and with
  ``calculate_kv_scales`` (``amax / 200`` of a layer's queries and keys, ``amax / 100`` of its values; here over all
  tokens). Queries and probabilities are E4M3 too: FlashAttention 3 multiplies ``exp(s - m)`` by 2^8 and rounds it, m
  being the largest score so far, from the last block of keys to the first, 96 keys a block as in its decode. Row sums
  are of what was not rounded. What FP8 tensor cores lose in their own sums is not emulated.
- *vLLM's kernel, ...*: FlashAttention 3 of vLLM's wheel itself on these operands, where there is one; its blocks are
  those of whole sequences.

For each: RMS, mean and largest error of a token's log-probability, KL, the change of the mean entropy; RMS and KL by
position. Attention itself is FP32 in all but the last, and its result BF16.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

from jetrl_verl import reference
from jetrl_verl.kernels.vllm_kernels import no_flash_attention_3
from jetrl_verl.tools.bench.report import Result
from jetrl_verl.tools.provenance import provenance

HEAD_DIM, OUTLIER = 128, 100.0
NAME = "kv_cache_accuracy"
COMMON = dict(head_dim=HEAD_DIM, max_position_embeddings=40960, tie_word_embeddings=False)
SHAPES = {
    "small": COMMON
    | dict(vocab_size=2000, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
    | dict(num_hidden_layers=4),
    "qwen3": COMMON
    | dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)
    | dict(num_hidden_layers=8),
}
BUCKETS = (0, 1024, 4096, 8192, 16384)
"""Positions, each bucket up to the next one."""
VLLM_RANGES = (200.0, 200.0, 100.0)
"""``Q_SCALE_CONSTANT``, ``K_SCALE_CONSTANT``, ``V_SCALE_CONSTANT`` of vLLM: ``calculate_kv_scales`` divides amax by
them."""
VLLM_KEYS, VLLM_OFFSET = 96, 8
"""Keys of a block in FP8 decode of FlashAttention 3 at 128 features; log2 of what its probabilities are multiplied
by."""
_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Scores of :func:`vllm_attention` at a time: what a cache holds, or what fills a GPU."""
_LOGITS = 2**28
"""Logits at a time."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def by_token_and_head(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_heads(reference.quantize_heads(x))


def by_token_and_head_in_fp32(x: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_1x128(reference.quantize_1x128(x, "fp32")).to(x.dtype)


def qdata_of(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-reference.E4M3_MAX, reference.E4M3_MAX).to(reference.FP8_DTYPE)


def with_scale(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (qdata_of(x, scale).float() * scale).to(x.dtype)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return with_scale(x, x.abs().float().amax(dim=(0, 2, 3), keepdim=True) / reference.E4M3_MAX)


def over(rule: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    """FP32 attention over what a cache makes of keys and values ``[B, Hkv, T, 128]`` BF16."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (rule(x).float().repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q.float(), k, v, is_causal=True, scale=scale)

    return attend


def vllm_scales(operands: tuple[torch.Tensor, ...], calibrated: bool) -> list[float]:
    if not calibrated:
        return [1.0, 1.0, 1.0]
    return [x.abs().max().item() / bound for x, bound in zip(operands, VLLM_RANGES, strict=True)]


def vllm_attention(calibrated: bool) -> Attention:
    """vLLM's FP8 attention in FP32 arithmetic; the module's docstring has what it rounds."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        scales = vllm_scales((q, k, v), calibrated)
        (batch, heads, tokens, _), kv_heads = q.shape, k.shape[1]
        q, k, v = (qdata_of(x, s).float() for x, s in zip((q, k, v), scales, strict=True))
        q = q.unflatten(1, (kv_heads, -1))
        out = torch.empty_like(q)
        step = max(VLLM_KEYS, _AT_ONCE[q.device.type] // (batch * heads * VLLM_KEYS))
        for start in range(0, tokens, step):
            rows = torch.arange(start, min(start + step, tokens), device=q.device)
            part = q[:, :, :, rows].flatten(2, 3)
            position = rows.repeat(heads // kv_heads)[:, None]
            most = part.new_full((*part.shape[:-1], 1), -torch.inf)
            total, sums = torch.zeros_like(most), torch.zeros_like(part)
            for first in reversed(range(0, int(rows[-1]) + 1, VLLM_KEYS)):
                keys = slice(first, min(first + VLLM_KEYS, tokens))
                s = part @ k[:, :, keys].transpose(-1, -2) * (scale * scales[0] * scales[1])
                s = s.masked_fill(torch.arange(keys.start, keys.stop, device=q.device) > position, -torch.inf)
                largest = torch.maximum(most, s.amax(dim=-1, keepdim=True))
                # Rows that this block and all behind it are hidden from have seen nothing yet.
                base = largest.masked_fill(largest == -torch.inf, 0)
                p = torch.exp(s - base) * 2.0**VLLM_OFFSET
                again = torch.exp(most - base)
                total = total * again + p.sum(dim=-1, keepdim=True)
                sums = sums * again + p.to(reference.FP8_DTYPE).float() @ v[:, :, keys]
                most = largest
            out[:, :, :, rows] = (sums / total * scales[2]).unflatten(2, (heads // kv_heads, -1))
        return out.flatten(1, 2)

    return attend


def vllm_kernel(calibrated: bool) -> Attention:
    """FlashAttention 3 as vLLM's backend calls it on an FP8 cache: pages of 16 tokens, a scale a sequence and head."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        scales, tokens = vllm_scales((q, k, v), calibrated), q.shape[2]
        found = []
        for operands in zip(q, k, v, strict=True):
            ours, *cache = (qdata_of(x, s).transpose(0, 1) for x, s in zip(operands, scales, strict=True))
            pages = -(-tokens // 16)
            cache = [F.pad(x.view(torch.uint8), (0, 0, 0, 0, 0, pages * 16 - tokens)).contiguous() for x in cache]
            whole = [x.view(reference.FP8_DTYPE).unflatten(0, (pages, 16)) for x in cache]
            descales = [torch.full((1, cache[0].shape[1]), s, device=q.device) for s in scales]
            out = torch.empty(ours.shape, dtype=torch.bfloat16, device=q.device)
            flash_attn_varlen_func(
                q=ours.contiguous(),
                k=whole[0],
                v=whole[1],
                out=out,
                cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=q.device),
                max_seqlen_q=tokens,
                seqused_k=torch.tensor([tokens], dtype=torch.int32, device=q.device),
                max_seqlen_k=tokens,
                softmax_scale=scale,
                causal=True,
                block_table=torch.arange(pages, dtype=torch.int32, device=q.device)[None],
                fa_version=3,
                q_descale=descales[0],
                k_descale=descales[1],
                v_descale=descales[2],
            )
            found.append(out.transpose(0, 1))
        return torch.stack(found)

    return attend


RULES: dict[str, Attention] = {
    "bf16": over(lambda x: x),
    "token+head": over(by_token_and_head),
    "token+head, fp32": over(by_token_and_head_in_fp32),
    "head": over(by_head),
    "1.0": over(lambda x: with_scale(x, 1.0)),
    "vLLM, 1.0": vllm_attention(False),
    "vLLM, calibrated": vllm_attention(True),
}
"""Name -> attention ``[B, H, T, 128]`` of queries ``[B, H, T, 128]``, keys and values ``[B, Hkv, T, 128]`` BF16."""
KERNELS = {"vLLM's kernel, 1.0": vllm_kernel(False), "vLLM's kernel, calibrated": vllm_kernel(True)}
"""The same on Hopper alone."""

_rule = RULES["bf16"]


def attention(module, query, key, value, attention_mask, scaling, **_):
    """As transformers calls it."""
    return _rule(query, key, value, scaling).transpose(1, 2).to(query.dtype), None


def drawn(kind: type, seed: int, fields: dict, device: str) -> PreTrainedModel:
    """A random model that attends to something and prefers something."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind(**fields))
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


def sample(model: PreTrainedModel, sequences: int, tokens: int, piece: int) -> torch.Tensor:
    """``[sequences, tokens]``: pieces that the model sampled behind one random token each."""
    torch.manual_seed(0)
    piece = min(piece, tokens)
    pieces = -(-tokens // piece)
    first = torch.randint(0, model.config.vocab_size, (sequences * pieces, 1), device=model.device)
    model.set_attn_implementation("sdpa")
    options = dict(max_length=piece, min_length=piece, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0)
    found = model.generate(first, attention_mask=torch.ones_like(first), **options)
    return found.view(sequences, -1)[:, :tokens]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: torch.Tensor, rule: Attention) -> torch.Tensor:
    """``[B, T, H]`` in front of the head, with a cache under ``rule``."""
    global _rule
    _rule = rule
    try:
        return torch.cat([model.model(input_ids=row, use_cache=False).last_hidden_state for row in ids.split(1)])
    finally:
        _rule = RULES["bf16"]


@torch.no_grad()
def compared(model: PreTrainedModel, exact: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of hidden states ``[B, T, H]``, each ``[B, T]``: error of the log-probability of a token that is drawn from
    ``exact``, KL of ``exact`` from ``found``, both entropies."""
    generator = torch.Generator(exact.device).manual_seed(1)
    head, parts = model.get_output_embeddings(), []
    step = max(1, _LOGITS // model.config.vocab_size)
    for a, b in zip(exact.flatten(0, 1).split(step), found.flatten(0, 1).split(step), strict=True):
        ours, theirs = (head(x).float().log_softmax(dim=-1) for x in (a, b))
        weights = ours.exp()
        drawn_tokens = weights.multinomial(1, generator=generator)
        difference = theirs - ours
        error = difference.gather(1, drawn_tokens)[:, 0]
        kl = -(weights * difference).sum(dim=-1)
        parts.append((error, kl, -(weights * ours).sum(dim=-1), -(theirs.exp() * theirs).sum(dim=-1)))
    return tuple(torch.cat(each).view(exact.shape[:2]) for each in zip(*parts, strict=True))


def measured(error: torch.Tensor, kl: torch.Tensor, exact: torch.Tensor, found: torch.Tensor) -> dict:
    """Numbers of :func:`compared`; by position those of each bucket that has a token."""
    error, kl = error.double(), kl.double()
    buckets = {}
    for start, stop in itertools.pairwise(BUCKETS):
        if start < error.shape[1]:
            here = slice(start, min(stop, error.shape[1]))
            rms = error[:, here].square().mean().sqrt().item()
            buckets[f"{here.start}-{here.stop}"] = {"rms": rms, "kl": kl[:, here].mean().item()}
    return {
        "rms": error.square().mean().sqrt().item(),
        "mean": error.mean().item(),
        "largest": error.abs().max().item(),
        "kl": kl.mean().item(),
        "entropy": (found - exact).double().mean().item(),
        "by_position": buckets,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of drawn models")
    parser.add_argument("--layers", type=int, help="of drawn models, instead of the shape's")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--piece", type=int, default=512, help="tokens that are sampled in one go")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    console = Console(width=150)
    makers = {str(path): partial(AutoModelForCausalLM.from_pretrained, path) for path in args.models}
    if not makers:
        fields = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
        for number, (name, kind) in enumerate((("QK norm", Qwen3Config), ("no QK norm", LlamaConfig)), start=1):
            makers[f"drawn, {name}"] = partial(drawn, kind, number, fields, args.device)
    rules = RULES | (KERNELS if args.device != "cpu" and no_flash_attention_3() is None else {})
    facts = {"build": provenance(), "device": args.device, "shape": None if args.models else args.shape}
    facts |= {name: getattr(args, name) for name in ("layers", "tokens", "sequences", "piece")}
    result = Result(args.out, {"command": "kv_cache_accuracy", **facts, "records": []})
    for name, make in makers.items():
        model = make().to(args.device, torch.bfloat16).eval()
        tokens = min(args.tokens, model.config.max_position_embeddings)
        ids = sample(model, args.sequences, tokens, args.piece)
        model.set_attn_implementation(NAME)
        for planted in (False, True):
            if planted:
                plant_outliers(model)
            exact = hidden_states(model, ids, rules["bf16"])
            table = None
            for rule, attend in rules.items():
                if rule == "bf16":
                    continue
                started = time.perf_counter()
                found = compared(model, exact, hidden_states(model, ids, attend))
                numbers = measured(*found)
                seconds = time.perf_counter() - started
                record = {"model": name, "tokens": tokens, "outliers": planted, "scales": rule, "seconds": seconds}
                result["records"].append(record | numbers)
                if table is None:
                    heads = (f"RMS {bucket}" for bucket in numbers["by_position"])
                    table = Table("scales", "RMS", "largest", "KL", "entropy", *heads)
                    kind = ", outliers" if planted else ""
                    table.title = f"{name}{kind}: {tokens} tokens, entropy {found[2].mean().item():.3f}"
                table.add_row(
                    rule,
                    *(f"{numbers[key]:.4f}" for key in ("rms", "largest")),
                    f"{numbers['kl']:.1e}",
                    f"{numbers['entropy']:+.4f}",
                    *(f"{bucket['rms']:.4f}" for bucket in numbers["by_position"].values()),
                )
            console.print(table)
            result.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

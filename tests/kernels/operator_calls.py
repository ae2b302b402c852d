# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One call of every operator of kernels/, for tests over all of them."""

from typing import Any

import torch

from jetrl_verl import kernels
from jetrl_verl.reference import QuantizedTensor, cache_shape

HEADS, KV_HEADS, TOKENS, PAGES = 2, 1, 20, 3


def calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Operation -> arguments of its operator, quantized tensors as qdata and scales."""

    def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(device, dtype)

    def whole(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    x, w, bias = normal(40, 256), normal(384, 256), normal(384)
    gate, up, dy = (normal(40, 256, seed=seed) for seed in range(3))
    of_norm = normal(40, 256), normal(256)
    rowwise, block = kernels.quantize_1x128(x, "fp32"), kernels.quantize_128x128(w, "fp32")
    columns_of_x, columns_of_w = kernels.quantize_128x1(x, "fp32"), kernels.quantize_128x1(normal(40, 384), "fp32")
    int8_x, int8_w = kernels.quantize_int8(x), kernels.quantize_int8(w)
    _, rstd = torch.ops.jetrl.rms_norm(*of_norm, 1e-6)

    logits, temperature, seeds = normal(5, 300, dtype=torch.float32), torch.ones(5, device=device), whole(*range(5))
    drawn = torch.ops.jetrl.draw(logits, temperature, seeds.long(), seeds.long())
    picked = whole(*range(10), dtype=torch.int64).view(5, 2)

    to_experts, experts, k = normal(40, 4, dtype=torch.float32), 4, 2
    chosen, weights = kernels.route(to_experts, k, True)
    few, many = kernels.segments(chosen, experts, 1), kernels.segments(chosen, experts, 128)
    blocks = kernels.quantize_128x128(normal(experts * 256, 256), "fp32")
    of_experts = QuantizedTensor(blocks.qdata.view(experts, 256, 256), blocks.scales.view(experts, 2, 2))
    rows = kernels.gather_quantized(rowwise, few.pair, k)
    columns = kernels.gather_relayout_128x1(rowwise, many.pair, k, "fp32")
    of_many = normal(len(many.pair), 256)
    product = kernels.grouped_gemm_nt(rows, of_experts, few.start)

    q = normal(TOKENS, HEADS, 128)
    key, value = (normal(TOKENS, KV_HEADS, 128, seed=seed) for seed in (1, 2))
    cu = whole(0, 7, TOKENS)
    packed = (q, key, value, cu, 13, 0.1)
    cache = torch.zeros(cache_shape(PAGES, 32, KV_HEADS), dtype=torch.uint8, device=device)
    slots = whole(*range(TOKENS), dtype=torch.int64)
    kernels.write_kv(key, value, cache, slots)
    of_heads = normal(128), normal(128), 1e-6, normal(64, 128), whole(*range(TOKENS))
    to_cache = q, key, value, *of_heads, True
    bf16_cache = normal(2, PAGES, 32, KV_HEADS, 128)
    lengths, table = whole(13, TOKENS), whole(0, 1, 0, 2).view(2, 2)
    pages = normal(PAGES, KV_HEADS, 16, 128)
    on_tokens = (kernels.cache_form(normal(PAGES, 32, KV_HEADS, 128, seed=seed)) for seed in (1, 2))
    on_pages = cu, whole(9, TOKENS), whole(0, 1, 1, 2).view(2, 2), 0.1

    qkv, taps, fresh = normal(TOKENS, 4 * 128), normal(4 * 128, 4), whole(0, 0)
    gates = *(normal(TOKENS, 2, seed=seed, dtype=torch.float32) for seed in (1, 2)), normal(2), normal(2, seed=1)
    conv_states, delta_states = normal(3, 3, 4 * 128), normal(3, 2, 193, 128, dtype=torch.float32)
    gated = normal(TOKENS, 2, 128), normal(TOKENS, 2, 128, seed=1), normal(128), 1e-6

    def gradients(name: str) -> tuple[Any, ...]:
        out, lse = getattr(torch.ops.jetrl, name)(*packed)
        return normal(TOKENS, HEADS, 128, seed=3), *packed[:4], out, lse, *packed[4:]

    arguments = {
        "quantize_1x128": (x.view(2, 20, 256), "fp32"),
        "quantize_128x1": (x, "fp32"),
        "quantize_1x128_and_128x1": (x, "pow2"),
        "quantize_128x128": (w, "fp32"),
        "quantize_128x128_and_transpose": (w, "fp32"),
        "relayout_128x1": (*rowwise, "fp32"),
        "transpose_128x128": tuple(block),
        "gemm_nt": (*rowwise, *block, bias, torch.bfloat16, False),
        "wgrad": (*columns_of_w, *columns_of_x, torch.bfloat16),
        "fprop": (x.view(2, 20, 256), *block, bias, "fp32"),
        "fprop_quantized": (*rowwise, *block, None, True),
        "quantize_int8": (x,),
        "gemm_int8": (*int8_x, *int8_w, bias, torch.bfloat16),
        "fprop_int8": (x, *int8_w, bias),
        "sum_of_ranks": ([x, x],),
        "merge_adapter": (w, w[:16], w[:, :16], 0.75),
        "block_sums": ([block.qdata, int8_w.qdata], torch.arange(2048, device=device)),
        "gemm_nt_of_ranks": (*rowwise, *block, 2),
        "route": (to_experts, k, True),
        "segments": (chosen, experts, 128),
        "route_and_permute": (to_experts, *rowwise, k, True),
        "gather_quantized": (*rowwise, few.pair, k),
        "gather_quantize_1x128_and_128x1": (x, many.pair, k, "fp32"),
        "gather_relayout_128x1": (*rowwise, many.pair, k, "fp32"),
        "grouped_gemm_nt": (*rows, *of_experts, few.start, 1),
        "grouped_gemm_nt_of_ranks": (*rows, *of_experts, few.start, 2, 1),
        "grouped_wgrad": (*columns, *columns, many.start),
        "weighted_silu_mul_quantize": (product, weights, few.pair, "fp32"),
        "weighted_silu_mul_backward_quantize": (of_many[:, :128], of_many, weights, many.pair, "fp32"),
        "combine": (product, few.row),
        "combine_of_ranks": (torch.stack([product, product]), few.row),
        "add_shared_expert": (x, dy, to_experts[:, :1]),
        "add_shared_expert_backward": (dy, x, to_experts[:, :1]),
        "combine_add_rms_norm": (product, few.row, *of_norm, 1e-6),
        "combine_add_rms_norm_quantize_1x128": (product, few.row, *of_norm, 1e-6, "fp32", False),
        "rms_norm": (*of_norm, 1e-6, True),
        "add_rms_norm": (x, *of_norm, 1e-6),
        "rms_norm_quantize_1x128": (*of_norm, 1e-6, "fp32"),
        "add_rms_norm_quantize_1x128": (x, *of_norm, 1e-6, "fp32", False),
        "rms_norm_backward": (dy, *of_norm, rstd),
        "silu_mul": (gate, up),
        "silu_mul_backward": (dy, gate, up),
        "silu_mul_quantize": (gate, up, "fp32", True),
        "silu_mul_backward_quantize": (dy, gate, up, "fp32"),
        "causal_conv1d": (qkv, taps, cu),
        "causal_conv1d_backward": (qkv, qkv, taps, cu),
        "causal_conv1d_update": (qkv, taps, conv_states, whole(2, 0), fresh, cu),
        "gated_delta_rule": (qkv, *gates, cu),
        "gated_delta_rule_backward": (normal(TOKENS, 2, 128), qkv, *gates, cu),
        "gated_delta_rule_update": (qkv, *gates, delta_states, whole(2, 0), fresh, cu, normal(TOKENS, 2, 128)),
        "gated_rms_norm": gated,
        "gated_rms_norm_backward": (normal(TOKENS, 2 * 128), *gated),
        "gated_rms_norm_quantize": (*gated, "fp32", True),
        "sigmoid_mul": (q, q),
        "sigmoid_mul_quantize": (q, q, "fp32", True),
        "sigmoid_mul_backward": (q.flatten(1), q, q),
        "norm_rotary": (q, key, *of_heads, True),
        "norm_rotary_write": (*to_cache, bf16_cache[0], bf16_cache[1], slots),
        "norm_rotary_write_fp8": (*to_cache, cache.clone(), slots),
        "rotary": (q, key, normal(64, 128), whole(*range(TOKENS)), False),
        "quantize_kv": (key, value),
        "quantize_dequantize_kv": (key, value),
        "dequantize_kv": torch.ops.jetrl.quantize_kv(key, value)[:4],
        "write_kv": (key, value, cache.clone(), slots),
        "read_kv": (cache, table, lengths, whole(0, 13, 13 + TOKENS), 13 + TOKENS, TOKENS),
        "decode_attention": (q[:2], cache, lengths, table, 0.1, torch.empty_like(q[:2])),
        "decode_attention_bf16": (q[:2], *on_tokens, lengths, table, 0.1, torch.empty_like(q[:2])),
        "chunk_attention": (q, cache, cu, 13, lengths, [13, TOKENS], table, 0.1, torch.empty_like(q)),
        "paged_attention": (q, pages, pages, *on_pages),
        "paged_attention_fp8": (q, cache, cu, lengths, table, 0.1),
        "attention": packed,
        "attention_backward": gradients("attention"),
        "varlen_attention": packed,
        "varlen_attention_backward": gradients("varlen_attention"),
        "logits": (x, w),
        "log_probs": (logits, picked, temperature),
        "log_probs_backward": (normal(5, 2, dtype=torch.float32), logits, picked, temperature),
        "draw": (logits, temperature, seeds.long(), seeds.long()),
        "drawn_log_probs": (logits, drawn[0], temperature, *drawn[1:]),
    }
    column = kernels.platform_of(torch.device(device))
    return {name: call for name, call in arguments.items() if column in kernels.OPERATIONS[name].backends}

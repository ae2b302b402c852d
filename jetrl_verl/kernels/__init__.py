# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The operations that trainer and rollout share, one file each: CPU reference, Triton kernels, binding to csrc/,
autograd function and torch operator. ``dispatch.py`` says which backend computes what."""

from jetrl_verl.kernels.attention import (
    HEAD_DIM,
    attention,
    attention_fp8,
    cache_form,
    paged_attention,
    paged_attention_fp8,
    write_pages,
)
from jetrl_verl.kernels.block_sums import block_sums
from jetrl_verl.kernels.combine import combine, combine_of_ranks
from jetrl_verl.kernels.combine_rms_norm import combine_add_rms_norm, combine_add_rms_norm_quantize_1x128
from jetrl_verl.kernels.decode_attention import (
    chunk_attention,
    decode_attention,
    decode_attention_bf16,
    decodes_natively,
)
from jetrl_verl.kernels.dispatch import BACKENDS, describe_backends, override_backend, platform_of
from jetrl_verl.kernels.draw import draw_tokens, drawn_log_probs
from jetrl_verl.kernels.fprop import fprop, fprop_quantized
from jetrl_verl.kernels.fprop_int8 import fprop_int8
from jetrl_verl.kernels.gather_quantize import gather_quantize_1x128_and_128x1
from jetrl_verl.kernels.gather_quantized import gather_quantized
from jetrl_verl.kernels.gather_relayout import gather_relayout_128x1
from jetrl_verl.kernels.gemm_int8 import gemm_int8
from jetrl_verl.kernels.gemm_nt import gemm_nt
from jetrl_verl.kernels.gemm_nt_of_ranks import gemm_nt_of_ranks
from jetrl_verl.kernels.grouped_gemm import grouped_gemm_nt, grouped_gemm_nt_of_ranks, grouped_wgrad
from jetrl_verl.kernels.kv_cache import (
    QuantizedKV,
    dequantize_kv,
    quantize_dequantize_kv,
    quantize_kv,
    read_kv,
    write_kv,
)
from jetrl_verl.kernels.log_probs import Normalized, log_probs
from jetrl_verl.kernels.logits import gradient_dtype, logits, logits_backward
from jetrl_verl.kernels.norm_rotary import norm_rotary
from jetrl_verl.kernels.norm_rotary_write import norm_rotary_write, norm_rotary_write_fp8
from jetrl_verl.kernels.quantize_1x128 import quantize_1x128, quantize_1x128_and_128x1, quantize_128x1
from jetrl_verl.kernels.quantize_128x128 import (
    quantize_128x128,
    quantize_128x128_and_transpose,
    transpose_128x128,
)
from jetrl_verl.kernels.quantize_int8 import quantize_int8
from jetrl_verl.kernels.relayout_128x1 import relayout_128x1
from jetrl_verl.kernels.rms_norm import add_rms_norm, add_rms_norm_quantize_1x128, rms_norm, rms_norm_quantize_1x128
from jetrl_verl.kernels.rotary import ROPE_TYPES, rotary, rotary_table
from jetrl_verl.kernels.route import route
from jetrl_verl.kernels.route_and_permute import route_and_permute
from jetrl_verl.kernels.segments import segments
from jetrl_verl.kernels.silu_mul import silu_mul, silu_mul_backward_quantize, silu_mul_quantize, silu_mul_quantize_1x128
from jetrl_verl.kernels.sum_of_ranks import sum_of_ranks
from jetrl_verl.kernels.varlen_attention import varlen_attention
from jetrl_verl.kernels.weighted_silu_mul import weighted_silu_mul_backward_quantize, weighted_silu_mul_quantize

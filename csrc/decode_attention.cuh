// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Shared by the kernels of decode attention: the unit of 16 tokens of one head of the FP8 KV cache
// (reference/kv_cache.py), its conversion to operands, and a softmax with the bits of FlashAttention 3 (docs/log.md).

#pragma once

#include <cmath>

#include "launch.h"
#include "pipeline.cuh"
#include "sm90.cuh"

namespace jetrl {

// Layout of a unit.
struct CacheUnit {
  static constexpr int kKeys = 16, kRow = 128, kMatrix = kKeys * kRow;
  static constexpr int kKeyScales = kMatrix, kValueScales = kKeyScales + kKeys, kValues = kValueScales + kKeys;
  static constexpr int kBytes = kValues + kMatrix;
  static constexpr int kChunk = kKeys * 16;  // of values: 16 features of all tokens
};

constexpr int kQueries = 8;       // of a KV head, padded: the columns of mma.m16n8k16
constexpr int kKeysOfABlock = 128, kUnitsOfABlock = kKeysOfABlock / CacheUnit::kKeys;

struct DecodeAttentionParams {
  const uint16_t* q;
  uint16_t* out;
  const int32_t *lengths, *table;
  int64_t stride_q, stride_out, stride_table;
  int kv_heads, group, units;  // units of a page
  float scale_log2;
};
struct Fp8Params : DecodeAttentionParams {
  const uint8_t* cache;
};

inline DecodeAttentionParams params_of(const DecodeAttention& call) {
  if (call.group < 1 || call.group > kQueries) {
    refuse("decode attention of " + std::to_string(call.group) +
           " query heads of a KV head is not supported. Use 1 to 8, or backend flash_attention_3.");
  }
  return {
      call.q,
      call.out,
      call.lengths,
      call.table,
      call.stride_q,
      call.stride_out,
      call.stride_table,
      call.kv_heads,
      call.group,
      call.units,
      // As in FlashAttention: rounded once, after a product in double precision.
      float(double(call.scale) * 1.4426950408889634),
  };
}

// How many lanes of a warp arrive after its sync, and whether this one does (kAllLanesRelease).
constexpr int kArrivals = kAllLanesRelease ? 32 : 1;
JETRL_DEVICE bool arrives() { return kAllLanesRelease || sm90::elect_one(); }

// Two or more thread blocks, in a cluster, for each request and KV head (sm90_decode_attention_cluster.cu).
void decode_attention_in_clusters(const Fp8Params& params, int pairs, int cluster, Stream stream);

// The upper byte of each half, E4M3, as BF16 times 2^-120.
JETRL_DEVICE uint32_t shifted(uint32_t halves) { return (halves & 0x80008000u) | (halves >> 4 & 0x07F007F0u); }

// The same for byte b of each half; the lower byte's sign stands between the halves until the shift moves it.
JETRL_DEVICE uint32_t shifted_halves(uint32_t halves, int b) {
  const uint32_t selector = uint32_t(b * 0x0011 + (8 + b) * 0x0100 + (b + 2) * 0x1000);
  return uint32_t(int32_t(sm90::permute_bytes_and_signs(halves, 0, selector)) >> 4) & 0x87F087F0u;
}

// Scales of two keys in the halves of a word -> the BF16 powers of two that multiply shifted(). Scales above 2^7, and
// NaN's 255, need a second factor.
constexpr int kLargeScale = 134;
JETRL_DEVICE uint32_t factors_of(uint32_t scales) { return (scales + 0x00780078u) << 7; }
JETRL_DEVICE uint32_t larger_scales(uint32_t scales) { return scales + 0x00790079u & 0x01000100u; }

JETRL_DEVICE uint32_t first_factor(uint32_t scale) {
  return scale == 255 ? 0x7FC0u : (scale > kLargeScale ? kLargeScale + 120u : scale + 120u) << 7;
}
JETRL_DEVICE uint32_t second_factor(uint32_t scale) {
  return (scale > kLargeScale ? scale - kLargeScale + 127 : 127) << 7;
}
JETRL_DEVICE uint32_t first_factors(uint32_t scales) {
  return first_factor(scales & 0xFF) | first_factor(scales >> 16) << 16;
}
JETRL_DEVICE uint32_t second_factors(uint32_t scales) {
  return second_factor(scales & 0xFF) | second_factor(scales >> 16) << 16;
}

JETRL_DEVICE uint32_t word_at(const uint8_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

// ---- scores --------------------------------------------------------------------------------------------------------

// A lane's part of Q as an operand, the same for every block of keys. A lane may hold any features of a group of 16 if
// both operands agree: here those of one word of a key.
struct Queries {
  uint32_t odd[8], even[8];

  JETRL_DEVICE void load(const uint16_t* q, int group) {
    const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint2 four{0, 0};
      if (g < group) four = *reinterpret_cast<const uint2*>(q + g * 128 + 16 * i + 4 * t);
      odd[i] = sm90::permute_bytes(four.x, four.y, 0x7632);
      even[i] = sm90::permute_bytes(four.x, four.y, 0x5410);
    }
  }
};

// K Q^T of two units, kStride bytes apart, with interleaved chains: lane 4g + t has keys g (d[0], d[1]) and g + 8,
// queries 2t and 2t + 1. The scales of keys are powers of two and multiply the results.
template <int kStride>
JETRL_DEVICE void compute_two_units(float (&d)[2][4], const uint8_t* units, const Queries& q) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  constexpr uint32_t kUnshift = 0x7B807B80;  // 2^120
  const uint8_t* row = units + g * CacheUnit::kRow + 4 * t;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int chunk = (k ^ (g & 7)) * 16;
    const uint32_t b[2] = {q.odd[k], q.even[k]};
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      const uint8_t* first = row + unit * kStride + chunk;
      const uint32_t w0 = word_at(first), w1 = word_at(first + 8 * CacheUnit::kRow);
      const uint32_t a[4] = {sm90::multiply_pair(shifted(w0), kUnshift), sm90::multiply_pair(shifted(w1), kUnshift),
                             sm90::multiply_pair(shifted(w0 << 8), kUnshift),
                             sm90::multiply_pair(shifted(w1 << 8), kUnshift)};
      sm90::mma_bf16(d[unit], a, b);
    }
  }
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    const uint8_t* scales = units + unit * kStride + CacheUnit::kKeyScales;
    const uint32_t s0 = scales[g], s1 = scales[g + 8];
    const float f0 = sm90::float_of(s0 == 255 ? 0x7FC00000u : s0 << 23);
    const float f1 = sm90::float_of(s1 == 255 ? 0x7FC00000u : s1 << 23);
    d[unit][0] = sm90::multiply_ftz(d[unit][0], f0), d[unit][1] = sm90::multiply_ftz(d[unit][1], f0);
    d[unit][2] = sm90::multiply_ftz(d[unit][2], f1), d[unit][3] = sm90::multiply_ftz(d[unit][3], f1);
  }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// Of a block of keys lane 4q + t has, for query q, columns 2t and 2t + 1 of each eight. A maximum has no order.
JETRL_DEVICE float largest_score(const float (&s)[32]) {
  float largest[4];
#pragma unroll
  for (int j = 0; j < 32; ++j) largest[j % 4] = j < 4 ? s[j] : sm90::larger_ftz(s[j], largest[j % 4]);
  return sm90::larger_ftz(sm90::larger_ftz(largest[0], largest[1]), sm90::larger_ftz(largest[2], largest[3]));
}

// In the first block only `left` keys exist, counted from the lane's first; the others get no score.
JETRL_DEVICE void mask_scores(float (&s)[32], int left) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    if (8 * (j / 2) + j % 2 >= left) s[j] = -INFINITY;
  }
}

JETRL_DEVICE float largest_of_quad(float highest) {
  highest = sm90::larger_ftz(highest, sm90::shuffle_xor(highest, 2));
  return sm90::larger_ftz(highest, sm90::shuffle_xor(highest, 1));
}

// The factor of O and of the sum so far where the maximum grows.
JETRL_DEVICE float rescaling(float before, float highest, float scale_log2) {
  return sm90::exp2_about(sm90::multiply_ftz(sm90::add_ftz(before, -highest), scale_log2));
}

// Scores to P.
JETRL_DEVICE void exponentiate(float (&s)[32], float highest, float scale_log2) {
  const float shift = highest == -INFINITY ? 0.0f : sm90::multiply_ftz(highest, scale_log2);
#pragma unroll
  for (int j = 0; j < 32; ++j) s[j] = sm90::exp2_about(sm90::multiply_add_ftz(s[j], scale_log2, -shift));
}

// A lane's sum plus P of a block.
JETRL_DEVICE float add_to_sum(float sum, float rescale, const float (&p)[32], bool is_first) {
  sum = is_first ? p[0] : sm90::multiply_add_ftz(rescale, sum, p[0]);
#pragma unroll
  for (int j = 1; j < 32; ++j) sum = sm90::add_ftz(sum, p[j]);
  return sum;
}

// As operands of the tensor cores: words 4j .. 4j + 3 of lane l are the l-th 16 bytes of the j-th 512.
JETRL_DEVICE void pack_probabilities(uint32_t (&words)[16], const float (&p)[32]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) words[j] = sm90::pack_bf16(p[2 * j], p[2 * j + 1]);
}
JETRL_DEVICE void store_probabilities(uint8_t* to, const uint32_t (&words)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    reinterpret_cast<uint4*>(to)[32 * j + sm90::own_lane()] =
        uint4{words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
  }
}

// The factor of O at the end.
JETRL_DEVICE float last_rescaling(float sum) {
  sum = sm90::add_ftz(sum, sm90::shuffle_xor(sum, 2));
  sum = sm90::add_ftz(sum, sm90::shuffle_xor(sum, 1));
  const bool nothing = sum == 0.0f || sum != sum;
  return nothing ? 0.0f : sm90::reciprocal_about(sum);
}

}  // namespace jetrl

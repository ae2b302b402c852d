// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The steps of the gated delta rule (reference/delta_net.py has the equations and the names) that chunks of tokens
// (sm90_delta_rule.cu) and single ones (sm90_delta_decode.cu) share. Their bits are equal because products take their
// operands in the same roles, sixteen products an instruction, keys or rows ascending, and all else is written here.
//
// State of a value head: rows of 128 BF16 words. 0..127: S of value v, 128 keys, to nearest even; 128..255: the int16
// that is added to those bits for FP32; 256..319: k^ of the open chunk's rows; 320..383: their u; 384: their G in FP32.
// S is written with the last row of a chunk, and not read in a sequence's first chunk, where it is zero.
//
// A product D[16 values x 8] of a warp: lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.

#pragma once

#include <cmath>

#include "launch.h"
#include "sm90.cuh"

namespace jetrl {
namespace delta {

constexpr int kHead = 128;              // keys and values of a head
constexpr int kChunk = 64, kBlock = 16;  // rows of a chunk, and of the blocks within
constexpr int kValues = 16;             // of a warp
constexpr int kGroups = kHead / 16;     // of keys, each one instruction
constexpr int kLowerRows = kHead, kKeyRows = 2 * kHead, kDeltaRows = kKeyRows + kChunk, kTotalRow = kDeltaRows + kChunk;
constexpr float kScale = 0x1.6a09e6p-4f;  // 128^-1/2

JETRL_DEVICE float as_bf16(float x) { return sm90::low_half(sm90::pack_bf16(x, 0.0f)); }

// Divides a row by its norm. Four lanes have it: lane l keys 16 g + 4 l and the three that follow, for each group g.
JETRL_DEVICE void normalize(uint2 (&row)[kGroups]) {
  constexpr float kEps = 1e-6f;
  float sums[4] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float x[4] = {sm90::low_half(row[g].x), sm90::high_half(row[g].x), sm90::low_half(row[g].y),
                        sm90::high_half(row[g].y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = sm90::multiply_add(x[i], x[i], sums[i]);
  }
  float sum = sm90::add(sm90::add(sums[0], sums[1]), sm90::add(sums[2], sums[3]));
  sum = sm90::add(sum, sm90::shuffle_xor(sum, 1));
  sum = sm90::add(sum, sm90::shuffle_xor(sum, 2));
  const float scale = sm90::reciprocal_root(sm90::add(sum, kEps));
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    row[g].x = sm90::pack_bf16(sm90::multiply(sm90::low_half(row[g].x), scale),
                               sm90::multiply(sm90::high_half(row[g].x), scale));
    row[g].y = sm90::pack_bf16(sm90::multiply(sm90::low_half(row[g].y), scale),
                               sm90::multiply(sm90::high_half(row[g].y), scale));
  }
}

// Logarithm of a token's decay, and its writing strength.
JETRL_DEVICE float log_decay(float a, float a_log, float dt_bias) {
  const float x = sm90::add(a, dt_bias);
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return sm90::multiply(-expf(as_bf16(a_log)), softplus);
}
JETRL_DEVICE float strength(float b) { return sm90::reciprocal(sm90::add(1.0f, expf(-b))); }

JETRL_DEVICE float decay_between(float later, float earlier) { return expf(sm90::add(later, -earlier)); }

// -a_tj and P_tj of k^_t k^_j or q^_t k^_j. Negative, so that u_t is a sum.
JETRL_DEVICE float factor_of_delta(float product, float beta, float decay) {
  return sm90::multiply(sm90::multiply(-beta, product), decay);
}
JETRL_DEVICE float factor_of_output(float product, float decay) {
  return as_bf16(sm90::multiply(sm90::multiply(kScale, product), decay));
}

// What the sums that become u_t and o_t begin with, of S16^T k^_t and S16^T q^_t.
JETRL_DEVICE float begin_delta(float recalled, float v, float beta, float since) {
  return sm90::multiply(beta, sm90::multiply_add(-since, recalled, v));
}
JETRL_DEVICE float begin_output(float recalled, float since) {
  return sm90::multiply(sm90::multiply(kScale, since), recalled);
}

// Two rows' u in a word, times what decays until the chunk's end.
JETRL_DEVICE uint32_t decayed(uint32_t u, float2 until) {
  return sm90::pack_bf16(sm90::multiply(until.x, sm90::low_half(u)), sm90::multiply(until.y, sm90::high_half(u)));
}

// A number of S as halves can have it: one halfway above an even BF16 number becomes the FP32 number before it.
JETRL_DEVICE float representable(float s) {
  const uint32_t bits = sm90::bits_of(s);
  return sm90::float_of((bits & 0x1FFFF) == 0x8000 ? bits - 1 : bits);
}
JETRL_DEVICE float2 join(uint32_t upper, uint32_t lower) {
  return {sm90::float_of((upper << 16) + uint32_t(int32_t(lower << 16) >> 16)),
          sm90::float_of((upper & 0xFFFF0000u) + uint32_t(int32_t(lower) >> 16))};
}
JETRL_DEVICE uint32_t lower_halves(float s0, float s1) {
  return sm90::permute_bytes(sm90::bits_of(s0), sm90::bits_of(s1), 0x5410);
}

// Word of two keys of S, those that a lane has of its row `value` in the product's columns 8 tile and further.
JETRL_DEVICE uint32_t* word_of_state(uint16_t* state, int value, int tile, int lane) {
  return reinterpret_cast<uint32_t*>(state + value * kHead + 8 * tile + 2 * (lane % 4));
}
constexpr int kToLower = kLowerRows * kHead / 2;  // words

JETRL_DEVICE void load_tile(float (&s)[4], uint16_t* state, int value, int tile, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t* word = word_of_state(state, value + 8 * r, tile, lane);
    const float2 pair = join(word[0], word[kToLower]);
    s[2 * r] = pair.x, s[2 * r + 1] = pair.y;
  }
}
JETRL_DEVICE void store_tile(const float (&s)[4], uint16_t* state, int value, int tile, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t* word = word_of_state(state, value + 8 * r, tile, lane);
    word[0] = sm90::pack_bf16(s[2 * r], s[2 * r + 1]);
    word[kToLower] = lower_halves(s[2 * r], s[2 * r + 1]);
  }
}

// S of one head's keys 8 tile .. 8 tile + 7 at a chunk's end, but for the products.
JETRL_DEVICE void decay_tile(float (&s)[4], float decay) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = sm90::multiply(decay, s[i]);
}
JETRL_DEVICE void round_tile(float (&s)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = representable(s[i]);
}

// Operands of a product from rows of 16-byte pieces in shared memory, where piece i of a row lies at i ^ (row % 8).
JETRL_DEVICE uint32_t piece(int row, int i, int pieces) { return row * pieces * 16 + ((i ^ (row & 7)) << 4); }

// A[16 rows x 16], from row and piece on.
JETRL_DEVICE void load_a(uint32_t (&a)[4], uint32_t tile, int row, int first, int pieces, int lane) {
  sm90::ldmatrix_x4(a, tile + piece(row + lane % 16, first + lane / 16, pieces));
}
// B[8 x 16] of eight rows and of the eight that follow.
JETRL_DEVICE void load_b(uint32_t (&low)[2], uint32_t (&high)[2], uint32_t tile, int row, int first, int pieces,
                         int lane) {
  uint32_t r[4];
  sm90::ldmatrix_x4(r, tile + piece(row + lane % 8 + lane / 16 * 8, first + lane / 8 % 2, pieces));
  low[0] = r[0], low[1] = r[1], high[0] = r[2], high[1] = r[3];
}
// B[8 x 16] of sixteen rows' columns of a piece and of the next one.
JETRL_DEVICE void load_b_transposed(uint32_t (&low)[2], uint32_t (&high)[2], uint32_t tile, int row, int first,
                                    int pieces, int lane) {
  uint32_t r[4];
  sm90::ldmatrix_x4_transposed(r, tile + piece(row + lane % 16, first + lane / 16, pieces));
  low[0] = r[0], low[1] = r[1], high[0] = r[2], high[1] = r[3];
}

// A sequence's tokens and its state in one head. Without a slot the tokens' outputs are zero.
struct Sequence {
  int begin, end, computed = 0;
  bool has_slot = true;
  uint16_t* state = nullptr;

  // The one after the last has the tokens after it.
  JETRL_DEVICE Sequence(const DeltaRule& p, int index, int head) {
    const bool after_last = index == p.sequences;
    begin = p.cu_seqlens[index], end = after_last ? p.tokens : p.cu_seqlens[index + 1];
    if (after_last || p.states == nullptr) {
      has_slot = !after_last;
      return;
    }
    const int64_t slot = p.slots[index];
    has_slot = slot >= 0;
    computed = p.computed[index];
    if (has_slot) state = reinterpret_cast<uint16_t*>(p.states + slot * p.stride_slot + head * p.stride_head);
  }

  JETRL_DEVICE void write_zeros(const DeltaRule& p, int head, int threads) const {
    constexpr int kPieces = kHead / 8;
    for (int i = sm90::thread_index(); i < (end - begin) * kPieces; i += threads) {
      uint16_t* row = p.out + (int64_t(begin + i / kPieces) * p.heads + head) * kHead;
      *reinterpret_cast<uint4*>(row + i % kPieces * 8) = uint4{0, 0, 0, 0};
    }
  }
};

// A token's query, key and values in qkv.
struct Rows {
  const uint16_t *q, *k, *v;

  JETRL_DEVICE Rows(const DeltaRule& p, int64_t token, int head) {
    const int key = head / (p.heads / p.keys);
    const uint16_t* row = p.qkv + token * (2 * p.keys + p.heads) * kHead;
    q = row + key * kHead, k = row + (p.keys + key) * kHead, v = row + (2 * p.keys + head) * kHead;
  }
};

}  // namespace delta
}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Attention of one new token of each request over an FP8 KV cache (reference/kv_cache.py), with the bits of
// FlashAttention 3 (num_splits=1) over the dequantized keys and values. A block has a request and a KV head; its
// queries are the 8 columns of mma.m16n8k16, so keys and features are rows and FP8 data become operands in registers:
//   S^T = K Q^T      16 keys a tile, features in groups of 16 ascending; then times the key's power-of-two scale
//   O^T = V^T P^T    16 features a tile, keys in groups of 16 ascending; V is dequantized to BF16, which is exact
// Keys go in blocks of 128 from the last to the first. Per block: maximum, P = 2^(S c - max c) by one fused operation,
// four partial sums per query (columns 2t, 2t+1 modulo 8), the first addition fused with the rescaling, P rounded to
// BF16, O rescaled, then O += P V. docs/log.md says which of these steps decide bits.
//
// Warps 0..3: scores of two units of 16 keys each. 4..7: 32 features of O each. 8: softmax, lane 4q + t of query q.
// 9: copies, a unit of 4,128 bytes a lane. Between them: a ring of key blocks, two of scores, two of P.

#include "decode_attention.cuh"

namespace jetrl {
namespace {

struct DecodeAttentionShape {
  static constexpr int kScoreWarps = 4, kOutputWarps = 4, kSoftmaxWarp = 8;
  static constexpr int kThreads = 320;
  static constexpr int kKeys = kKeysOfABlock, kUnits = kUnitsOfABlock, kUnitKeys = CacheUnit::kKeys;
  static constexpr int kUnit = CacheUnit::kBytes, kStages = 3, kStage = kUnits * kUnit;
  static constexpr int kScoreRow = kKeys + 8;  // four queries' float2 of a warp's half lie in different banks
  static constexpr int kScores = kQueries * kScoreRow * 4, kProbabilities = kQueries * kKeys * 2;

  static constexpr int kScoresAt = kStages * kStage;
  static constexpr int kProbabilitiesAt = kScoresAt + 2 * kScores;
  static constexpr int kFactorsAt = kProbabilitiesAt + 2 * kProbabilities;
  static constexpr int kBarriersAt = kFactorsAt + 2 * kQueries * 4;
  static constexpr int kBytes = kBarriersAt + 8 * (2 * kStages + 8);
};
using Shape = DecodeAttentionShape;

struct Barriers {
  uint32_t first;

  JETRL_DEVICE uint32_t full(int stage) const { return first + 8 * stage; }
  JETRL_DEVICE uint32_t empty(int stage) const { return first + 8 * (Shape::kStages + stage); }
  JETRL_DEVICE uint32_t scores_full(int i) const { return first + 8 * (2 * Shape::kStages + i); }
  JETRL_DEVICE uint32_t scores_empty(int i) const { return scores_full(2 + i); }
  JETRL_DEVICE uint32_t p_full(int i) const { return scores_full(4 + i); }
  JETRL_DEVICE uint32_t p_empty(int i) const { return scores_full(6 + i); }
};

// ---- scores --------------------------------------------------------------------------------------------------------

JETRL_DEVICE void compute_scores(const DecodeAttentionParams& p, uint8_t* memory, const Barriers& barriers,
                                 const uint16_t* q, int blocks, int warp) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  Queries queries;
  queries.load(q, p.group);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    const int ring = i & 1;
    sm90::barrier_wait(barriers.full(stage), parity, "full", stage);
    if (i >= 2) sm90::barrier_wait(barriers.scores_empty(ring), ((i >> 1) - 1) & 1, "scores_empty", ring);
    float* scores = reinterpret_cast<float*>(memory + Shape::kScoresAt + ring * Shape::kScores);
    const uint8_t* at = memory + stage * Shape::kStage + 2 * warp * Shape::kUnit;
    float d[2][4] = {};
    compute_two_units<CacheUnit::kBytes>(d, at, queries);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      float* to = scores + 2 * t * Shape::kScoreRow + 16 * (2 * warp + unit) + g;
      to[0] = d[unit][0], to[Shape::kScoreRow] = d[unit][1];
      to[8] = d[unit][2], to[Shape::kScoreRow + 8] = d[unit][3];
    }
    sm90::sync_warp();
    if (arrives()) {
      sm90::barrier_arrive(barriers.scores_full(ring));
      sm90::barrier_arrive(barriers.empty(stage));
    }
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

JETRL_DEVICE void compute_softmax(const DecodeAttentionParams& p, uint8_t* memory, const Barriers& barriers, int blocks,
                                  int length) {
  const int lane = sm90::own_lane(), query = lane / 4, t = lane % 4;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactorsAt);
  float row_max = 0, row_sum = 0;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    const int ring = i & 1;
    sm90::barrier_wait(barriers.scores_full(ring), (i >> 1) & 1, "scores_full", ring);
    const float* scores = reinterpret_cast<const float*>(memory + Shape::kScoresAt + ring * Shape::kScores) +
                          query * Shape::kScoreRow + 2 * t;
    float s[32];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(scores + 8 * j);
      s[2 * j] = two.x, s[2 * j + 1] = two.y;
    }
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.scores_empty(ring));
    if (i == 0) mask_scores(s, length - (blocks - 1) * Shape::kKeys - 2 * t);
    float highest = largest_score(s);
    if (i > 0) highest = sm90::larger_ftz(highest, row_max);
    highest = largest_of_quad(highest);
    const float rescale = i == 0 ? 1.0f : rescaling(row_max, highest, p.scale_log2);
    row_max = highest;
    exponentiate(s, highest, p.scale_log2);
    row_sum = add_to_sum(row_sum, rescale, s, i == 0);
    uint32_t words[16];
    pack_probabilities(words, s);
    if (i >= 2) sm90::barrier_wait(barriers.p_empty(ring), ((i >> 1) - 1) & 1, "p_empty", ring);
    store_probabilities(memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities, words);
    if (t == 0) factors[ring * kQueries + query] = rescale;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.p_full(ring));
  }
  const float inverse = last_rescaling(row_sum);
  const int ring = blocks & 1;
  if (blocks >= 2) sm90::barrier_wait(barriers.p_empty(ring), ((blocks >> 1) - 1) & 1, "p_empty", ring);
  if (t == 0) factors[ring * kQueries + query] = inverse;
  sm90::sync_warp();
  if (arrives()) sm90::barrier_arrive(barriers.p_full(ring));
}

// ---- output --------------------------------------------------------------------------------------------------------

// D += V^T P^T of a block of keys. In the first block only `left` keys exist; P is 0 for the others, whose bytes are
// arbitrary: as data they are finite numbers, as scales they are replaced.
template <bool kFirst>
JETRL_DEVICE void add_block(float (&d)[2][4], const uint8_t* block, const uint4 (&p)[4], int left, int warp) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int unit = 0; unit < Shape::kUnits; ++unit) {
    const uint8_t* at = block + unit * Shape::kUnit;
    uint32_t w[4], scales[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int key = 2 * t + k % 2 + 8 * (k / 2);
      const int place = (2 * warp + g / 4) * CacheUnit::kKeys + (key ^ g / 4);
      w[k] = word_at(at + CacheUnit::kValues + place * 16 + 4 * (g % 4));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int key = 2 * t + 8 * k;
      const uint32_t both = *reinterpret_cast<const uint16_t*>(at + CacheUnit::kValueScales + key);
      scales[k] = sm90::permute_bytes(both, 0, 0x4140);
      if (kFirst && 16 * unit + key >= left) scales[k] = 127 | 127 << 16;
      if (kFirst && 16 * unit + key + 1 >= left) scales[k] = (scales[k] & 0xFF) | 127 << 16;
    }
    uint32_t f[2] = {factors_of(scales[0]), factors_of(scales[1])};
    const bool large = (larger_scales(scales[0]) | larger_scales(scales[1])) != 0;
    if (large) f[0] = first_factors(scales[0]), f[1] = first_factors(scales[1]);
    uint32_t a[2][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t selector = uint32_t(b * 0x0011 + (b + 4) * 0x1100);
      a[b / 2][b % 2] = sm90::multiply_pair(shifted(sm90::permute_bytes(w[0], w[1], selector)), f[0]);
      a[b / 2][b % 2 + 2] = sm90::multiply_pair(shifted(sm90::permute_bytes(w[2], w[3], selector)), f[1]);
    }
    if (large) {
      const uint32_t second[2] = {second_factors(scales[0]), second_factors(scales[1])};
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j / 4][j % 4] = sm90::multiply_pair(a[j / 4][j % 4], second[j % 4 / 2]);
    }
    sm90::sync_warp();  // mma needs a converged warp
    const uint4 four = p[unit / 2];
    const uint32_t b[2] = {unit % 2 == 0 ? four.x : four.z, unit % 2 == 0 ? four.y : four.w};
    sm90::mma_bf16(d[0], a[0], b);
    sm90::mma_bf16(d[1], a[1], b);
  }
}

JETRL_DEVICE void compute_output(const DecodeAttentionParams& p, uint8_t* memory, const Barriers& barriers,
                                 uint16_t* out, int blocks, int length, int warp) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  const float* factors = reinterpret_cast<const float*>(memory + Shape::kFactorsAt) + 2 * t;
  // Feature 32 warp + 4 g + b is row g + 8 (b % 2) of tile b / 2.
  float d[2][4] = {};
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    const int ring = i & 1;
    sm90::barrier_wait(barriers.full(stage), parity, "full", stage);
    sm90::barrier_wait(barriers.p_full(ring), (i >> 1) & 1, "p_full", ring);
    const uint4* probabilities =
        reinterpret_cast<const uint4*>(memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities) + lane;
    uint4 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = probabilities[32 * j];
    if (i > 0) {
      const float2 rescale = *reinterpret_cast<const float2*>(factors + ring * kQueries);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        d[j][0] = sm90::multiply_ftz(d[j][0], rescale.x), d[j][1] = sm90::multiply_ftz(d[j][1], rescale.y);
        d[j][2] = sm90::multiply_ftz(d[j][2], rescale.x), d[j][3] = sm90::multiply_ftz(d[j][3], rescale.y);
      }
    }
    const uint8_t* block = memory + stage * Shape::kStage;
    if (i == 0) {
      add_block<true>(d, block, words, length - (blocks - 1) * Shape::kKeys, warp);
    } else {
      add_block<false>(d, block, words, Shape::kKeys, warp);
    }
    // Every lane has read the block: the last unit's sync came after its reads.
    if (arrives()) {
      sm90::barrier_arrive(barriers.p_empty(ring));
      sm90::barrier_arrive(barriers.empty(stage));
    }
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
  const int ring = blocks & 1;
  sm90::barrier_wait(barriers.p_full(ring), (blocks >> 1) & 1, "p_full", ring);
  const float2 inverse = *reinterpret_cast<const float2*>(factors + ring * kQueries);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float by = n == 0 ? inverse.x : inverse.y;
    const uint2 four{
        sm90::pack_bf16(sm90::multiply_ftz(d[0][n], by), sm90::multiply_ftz(d[0][n + 2], by)),
        sm90::pack_bf16(sm90::multiply_ftz(d[1][n], by), sm90::multiply_ftz(d[1][n + 2], by)),
    };
    const int query = 2 * t + n;
    if (query < p.group) *reinterpret_cast<uint2*>(out + query * 128 + 32 * warp + 4 * g) = four;
  }
}

// ---- copies --------------------------------------------------------------------------------------------------------

JETRL_DEVICE void copy_keys_and_values(const Fp8Params& p, uint32_t memory, const Barriers& barriers,
                                       const int32_t* table, int head, int blocks, int length) {
  const int lane = sm90::own_lane();
  const int units = ceil_div(length, Shape::kUnitKeys);
  const auto page_of = [&](int block) {
    const int unit = block * Shape::kUnits + lane;
    return lane < Shape::kUnits && unit < units ? table[unit / p.units] : 0;
  };
  int page = page_of(blocks - 1), stage = 0, parity = 0;
#pragma unroll 1
  for (int block = blocks - 1; block >= 0; --block) {
    const int next = block > 0 ? page_of(block - 1) : 0;  // loaded during the wait for this one's stage
    const int first = block * Shape::kUnits, left = units - first, count = left < Shape::kUnits ? left : Shape::kUnits;
    if (blocks - 1 - block >= Shape::kStages) sm90::barrier_wait(barriers.empty(stage), parity ^ 1, "empty", stage);
    sm90::sync_warp();
    if (sm90::elect_one()) sm90::barrier_arrive_expect(barriers.full(stage), count * Shape::kUnit);
    sm90::sync_warp();
    if (lane < count) {
      const int64_t unit = (int64_t(page) * p.kv_heads + head) * p.units + (first + lane) % p.units;
      sm90::bulk_load(memory + stage * Shape::kStage + lane * Shape::kUnit, p.cache + unit * Shape::kUnit, Shape::kUnit,
                      barriers.full(stage));
    }
    page = next;
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
}

JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 2)
    decode_attention_kernel(JETRL_GRID_CONSTANT Fp8Params p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const int warp = sm90::warp_uniform(sm90::thread_index() / 32);
  const int head = sm90::block_index() % p.kv_heads, request = sm90::block_index() / p.kv_heads;
  const int length = p.lengths[request], blocks = ceil_div(length, Shape::kKeys);
  const uint16_t* q = p.q + request * p.stride_q + int64_t(head) * p.group * 128;
  uint16_t* out = p.out + request * p.stride_out + int64_t(head) * p.group * 128;
  if (length <= 0) {  // of no request
    for (int i = sm90::thread_index(); i < p.group * 128; i += Shape::kThreads) out[i] = 0;
    return;
  }
  const Barriers barriers{sm90::shared_address(memory + Shape::kBarriersAt)};
  if (sm90::thread_index() == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      sm90::barrier_init(barriers.full(stage), 1);
      sm90::barrier_init(barriers.empty(stage), kArrivals * (Shape::kScoreWarps + Shape::kOutputWarps));
    }
    for (int i = 0; i < 2; ++i) {
      sm90::barrier_init(barriers.scores_full(i), kArrivals * Shape::kScoreWarps);
      sm90::barrier_init(barriers.scores_empty(i), kArrivals);
      sm90::barrier_init(barriers.p_full(i), kArrivals);
      sm90::barrier_init(barriers.p_empty(i), kArrivals * Shape::kOutputWarps);
    }
    sm90::fence_barrier_init();
  }
  sm90::sync_block();
  if (warp < Shape::kScoreWarps) {
    compute_scores(p, memory, barriers, q, blocks, warp);
  } else if (warp < Shape::kSoftmaxWarp) {
    compute_output(p, memory, barriers, out, blocks, length, warp - Shape::kScoreWarps);
  } else if (warp == Shape::kSoftmaxWarp) {
    compute_softmax(p, memory, barriers, blocks, length);
  } else {
    copy_keys_and_values(p, sm90::shared_address(memory), barriers, p.table + request * p.stride_table, head, blocks,
                         length);
  }
}

}  // namespace

void decode_attention(const DecodeAttention& call, const void* cache, Stream stream) {
  const Fp8Params params{params_of(call), static_cast<const uint8_t*>(cache)};
  const int pairs = call.requests * call.kv_heads;
  if (call.cluster != 1) return decode_attention_in_clusters(params, pairs, call.cluster, stream);
  const Grid grid{pairs, 1, Shape::kThreads, Shape::kBytes, stream};
  launch<decode_attention_kernel>(grid, params);
}

}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The attention of sm90_decode_attention.cu with C = 2, 4 or 8 blocks, a cluster, for each request and KV head: for
// calls with fewer of these than the GPU holds blocks. The arithmetic and its order are the same, so the bits are.
//
// Each byte is brought once. Block r brings the keys of every C-th block of 128 keys and computes their scores, which
// the copy engine sends to the other blocks' shared memory, with the values' scales in front; of values it brings its
// own 128 / C features. The softmax, one chain over all keys, each block computes for itself from the same scores.
//
// Warps 0..3: scores of two units of 16 keys each. Then 8 / C: 16 features of O each. Then two of softmax, lane 4q + t
// of query q: each of every second block of keys; they hand over the maximum before P is computed, the sum behind it.
// Then copies of keys, then of values. Between them: rings of keys, of values, of scores (a multiple of C long, so that
// a place in it has one owner, for whose next scores every block makes it free), two of P. No block leaves before all
// have what it sends.

#include "decode_attention.cuh"

namespace jetrl {
namespace {

template <int kBlocks>
struct ClusterShape {
  static constexpr int kScoreWarps = 4, kOutputWarps = 8 / kBlocks;
  static constexpr int kSoftmaxWarp = kScoreWarps + kOutputWarps;
  static constexpr int kKeyWarp = kSoftmaxWarp + 2, kValueWarp = kKeyWarp + 1;
  static constexpr int kThreads = 32 * (kValueWarp + 1);
  // Of a unit: what comes with its keys, and a block's values.
  static constexpr int kKeyUnit = CacheUnit::kValues, kValueUnit = CacheUnit::kMatrix / kBlocks;
  static constexpr int kKeyStages = kBlocks < 8 ? 3 : 2, kKeyStage = kUnitsOfABlock * kKeyUnit;
  static constexpr int kValueStages = kBlocks < 4 ? 4 : 8, kValueStage = kUnitsOfABlock * kValueUnit;
  // What a warp has computed: its values' scales, then a row of scores of each query. Rows lie in different banks.
  static constexpr int kPartKeys = 2 * CacheUnit::kKeys, kScoreRow = kPartKeys + 8;
  static constexpr int kPart = kPartKeys + kQueries * kScoreRow * 4;
  static constexpr int kPlaces = kBlocks < 4 ? 4 : kBlocks, kScores = kScoreWarps * kPart;
  // P; what values are multiplied by, a row for each lane of a quad; their scales; the rescaling; if any is large.
  static constexpr int kFactorRow = 20;
  static constexpr int kFactors = kQueries * kKeysOfABlock * 2, kScales = kFactors + 4 * kFactorRow * 4;
  static constexpr int kRescale = kScales + kKeysOfABlock, kLarge = kRescale + kQueries * 4;
  static constexpr int kProbabilities = kLarge + 16;
  static constexpr int kHandedOver = (kQueries + 32) * 4;  // by a softmax warp: maxima of queries, sums of lanes

  static constexpr int kValuesAt = kKeyStages * kKeyStage;
  static constexpr int kScoresAt = kValuesAt + kValueStages * kValueStage;
  static constexpr int kProbabilitiesAt = kScoresAt + kPlaces * kScores;
  static constexpr int kHandedOverAt = kProbabilitiesAt + 2 * kProbabilities;
  static constexpr int kBarriersAt = kHandedOverAt + 2 * kHandedOver;
  static constexpr int kBytes = kBarriersAt + 8 * (2 * (kKeyStages + kValueStages + kPlaces) + 8);
  static_assert(kPlaces % kBlocks == 0 && kBytes <= 114 * 1024 - 1024, "two blocks on a multiprocessor");
};

constexpr int kMoreThanHalf = 116 * 1024;  // of a multiprocessor's shared memory

template <class Shape>
struct ClusterBarriers {
  uint32_t first;

  JETRL_DEVICE uint32_t keys_full(int stage) const { return first + 8 * stage; }
  JETRL_DEVICE uint32_t keys_empty(int stage) const { return keys_full(Shape::kKeyStages + stage); }
  JETRL_DEVICE uint32_t values_full(int stage) const { return keys_full(2 * Shape::kKeyStages + stage); }
  JETRL_DEVICE uint32_t values_empty(int stage) const { return values_full(Shape::kValueStages + stage); }
  JETRL_DEVICE uint32_t scores_full(int place) const { return values_full(2 * Shape::kValueStages + place); }
  JETRL_DEVICE uint32_t scores_empty(int place) const { return scores_full(Shape::kPlaces + place); }
  JETRL_DEVICE uint32_t p_full(int i) const { return scores_full(2 * Shape::kPlaces + i); }
  JETRL_DEVICE uint32_t p_empty(int i) const { return p_full(2 + i); }
  JETRL_DEVICE uint32_t max_full(int i) const { return p_full(4 + i); }
  JETRL_DEVICE uint32_t sum_full(int i) const { return p_full(6 + i); }

  JETRL_DEVICE void init(int blocks_of_cluster, int rank) const {
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      sm90::barrier_init(keys_full(stage), 1);
      sm90::barrier_init(keys_empty(stage), kArrivals * Shape::kScoreWarps);
    }
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      sm90::barrier_init(values_full(stage), 1);
      sm90::barrier_init(values_empty(stage), kArrivals * Shape::kOutputWarps);
    }
    for (int place = 0; place < Shape::kPlaces; ++place) {
      // The own warps that write here, or who says how many bytes come from another block.
      sm90::barrier_init(scores_full(place), place % blocks_of_cluster == rank ? kArrivals * Shape::kScoreWarps : 1);
      sm90::barrier_init(scores_empty(place), kArrivals * blocks_of_cluster);
    }
    for (int i = 0; i < 2; ++i) {
      sm90::barrier_init(p_full(i), kArrivals);
      sm90::barrier_init(p_empty(i), kArrivals * Shape::kOutputWarps);
      sm90::barrier_init(max_full(i), kArrivals);
      sm90::barrier_init(sum_full(i), kArrivals);
    }
    sm90::fence_barrier_init();
  }
};

// Bytes of a warp's part that are sent.
template <class Shape>
JETRL_DEVICE int part_bytes(int group) {
  return Shape::kPartKeys + group * Shape::kScoreRow * 4;
}

// ---- scores --------------------------------------------------------------------------------------------------------

template <int kBlocks, class Shape = ClusterShape<kBlocks>>
JETRL_DEVICE void compute_scores(const DecodeAttentionParams& p, uint8_t* memory,
                                 const ClusterBarriers<Shape>& barriers, const uint16_t* q, int blocks, int rank,
                                 int warp) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  Queries queries;
  queries.load(q, p.group);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = rank; i < blocks; i += kBlocks) {
    const int place = i % Shape::kPlaces, lap = i / Shape::kPlaces;
    sm90::barrier_wait(barriers.keys_full(stage), parity, "keys_full", stage);
    const uint8_t* units = memory + stage * Shape::kKeyStage + 2 * warp * Shape::kKeyUnit;
    float d[2][4] = {};
    compute_two_units<Shape::kKeyUnit>(d, units, queries);
    uint32_t scales = 0;
    if (lane < 8) scales = word_at(units + lane / 4 * Shape::kKeyUnit + CacheUnit::kValueScales + lane % 4 * 4);
    if (lap > 0) sm90::barrier_wait(barriers.scores_empty(place), (lap - 1) & 1, "scores_empty", place);
    uint8_t* part = memory + Shape::kScoresAt + place * Shape::kScores + warp * Shape::kPart;
    if (lane < 8) *reinterpret_cast<uint32_t*>(part + 4 * lane) = scales;
    float* scores = reinterpret_cast<float*>(part + Shape::kPartKeys);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      float* to = scores + 2 * t * Shape::kScoreRow + 16 * unit + g;
      to[0] = d[unit][0], to[Shape::kScoreRow] = d[unit][1];
      to[8] = d[unit][2], to[Shape::kScoreRow + 8] = d[unit][3];
    }
    sm90::fence_for_copies();
    sm90::sync_warp();
    if (sm90::elect_one()) {
      const uint32_t from = sm90::shared_address(part);
#pragma unroll
      for (int other = 1; other < kBlocks; ++other) {
        const int to = (rank + other) % kBlocks;
        sm90::bulk_copy_in_cluster(sm90::address_in_cluster(from, to), from, part_bytes<Shape>(p.group),
                                   sm90::address_in_cluster(barriers.scores_full(place), to));
      }
    }
    if (arrives()) {
      sm90::barrier_arrive(barriers.scores_full(place));
      sm90::barrier_arrive(barriers.keys_empty(stage));
    }
    if (++stage == Shape::kKeyStages) stage = 0, parity ^= 1;
  }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

template <int kBlocks, class Shape = ClusterShape<kBlocks>>
JETRL_DEVICE void compute_softmax(const DecodeAttentionParams& p, uint8_t* memory,
                                  const ClusterBarriers<Shape>& barriers, int blocks, int length, int rank, int warp) {
  const int lane = sm90::own_lane(), query = lane / 4, t = lane % 4, other = warp ^ 1;
  const int left = length - (blocks - 1) * kKeysOfABlock;
  float* mine = reinterpret_cast<float*>(memory + Shape::kHandedOverAt + warp * Shape::kHandedOver);
  const float* theirs = reinterpret_cast<const float*>(memory + Shape::kHandedOverAt + other * Shape::kHandedOver);
  uint8_t* to = memory + Shape::kProbabilitiesAt + warp * Shape::kProbabilities;
  float row_sum = 0;
#pragma unroll 1
  for (int i = warp; i < blocks; i += 2) {
    const int place = i % Shape::kPlaces, owner = i % kBlocks, handed = (i - 1) >> 1 & 1;
    if (owner != rank && sm90::elect_one()) {
      sm90::barrier_arrive_expect(barriers.scores_full(place), Shape::kScoreWarps * part_bytes<Shape>(p.group));
    }
    sm90::barrier_wait(barriers.scores_full(place), i / Shape::kPlaces & 1, "scores_full", place);
    const uint8_t* parts = memory + Shape::kScoresAt + place * Shape::kScores;
    float s[32];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint8_t* at = parts + j / 4 * Shape::kPart + Shape::kPartKeys;
      const float2 two = *reinterpret_cast<const float2*>(at + 4 * (query * Shape::kScoreRow + 2 * t + 8 * (j % 4)));
      s[2 * j] = two.x, s[2 * j + 1] = two.y;
    }
    uint32_t scales = word_at(parts + lane / 8 * Shape::kPart + lane % 8 * 4);  // of keys 4 lane ..
    sm90::sync_warp();
    // Only where the owner waits for it, so that none comes to a block that has left.
    if (i + Shape::kPlaces < blocks && arrives()) {
      sm90::barrier_arrive_in_cluster(sm90::address_in_cluster(barriers.scores_empty(place), owner));
    }
    if (i == 0) {
      mask_scores(s, left - 2 * t);
      // P is 0 for keys behind the last, whose bytes may be anything: a scale among them is replaced.
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (4 * lane + b >= left) scales = (scales & ~(0xFFu << 8 * b)) | 127u << 8 * b;
      }
    }
    const uint32_t pairs[2] = {sm90::permute_bytes(scales, 0, 0x4140), sm90::permute_bytes(scales, 0, 0x4342)};
    const bool large = sm90::count_true((larger_scales(pairs[0]) | larger_scales(pairs[1])) != 0) != 0;

    float highest = largest_of_quad(largest_score(s)), before = 0;
    if (i > 0) {
      sm90::barrier_wait(barriers.max_full(other), handed, "max_full", other);
      before = theirs[query];
      highest = sm90::larger_ftz(highest, before);
    }
    if (t == 0) mine[query] = highest;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.max_full(warp));

    const float rescale = i == 0 ? 1.0f : rescaling(before, highest, p.scale_log2);
    exponentiate(s, highest, p.scale_log2);
    uint32_t words[16];
    pack_probabilities(words, s);
    if (i >= 2) sm90::barrier_wait(barriers.p_empty(warp), ((i >> 1) - 1) & 1, "p_empty", warp);
    store_probabilities(to, words);
    uint32_t* factors = reinterpret_cast<uint32_t*>(to + Shape::kFactors);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int pair = 2 * (lane % 4) + b;  // of a unit's eight: that of lane pair % 4 of a quad, first or second
      factors[pair % 4 * Shape::kFactorRow + 2 * (lane / 4) + pair / 4] = factors_of(pairs[b]);
    }
    reinterpret_cast<uint32_t*>(to + Shape::kScales)[lane] = scales;
    if (t == 0) reinterpret_cast<float*>(to + Shape::kRescale)[query] = rescale;
    if (lane == 0) *reinterpret_cast<uint32_t*>(to + Shape::kLarge) = large;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.p_full(warp));

    if (i > 0) {
      sm90::barrier_wait(barriers.sum_full(other), handed, "sum_full", other);
      row_sum = theirs[kQueries + lane];
    }
    row_sum = add_to_sum(row_sum, rescale, s, i == 0);
    mine[kQueries + lane] = row_sum;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.sum_full(warp));
  }
  if (warp != (blocks - 1) % 2) return;  // the last block's has all of the sum
  const float inverse = last_rescaling(row_sum);
  if (blocks >= 2) sm90::barrier_wait(barriers.p_empty(other), ((blocks >> 1) - 1) & 1, "p_empty", other);
  to = memory + Shape::kProbabilitiesAt + other * Shape::kProbabilities;
  if (t == 0) reinterpret_cast<float*>(to + Shape::kRescale)[query] = inverse;
  sm90::sync_warp();
  if (arrives()) sm90::barrier_arrive(barriers.p_full(other));
}

// ---- output --------------------------------------------------------------------------------------------------------

// D += V^T P^T of a block of keys and a chunk of 16 features, of which 2g + b is row g + 8b.
template <class Shape, bool kLarge>
JETRL_DEVICE void add_chunk(float (&d)[4], const uint8_t* values, const uint8_t* p, bool is_odd) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  const uint4* probabilities = reinterpret_cast<const uint4*>(p) + lane;
  const uint4* factors = reinterpret_cast<const uint4*>(p + Shape::kFactors + t * Shape::kFactorRow * 4);
  const uint8_t* first = values + (2 * t + is_odd) * 16 + 2 * g;       // of an even key
  const uint8_t* second = values + (2 * t + 1 - is_odd) * 16 + 2 * g;  // of the odd one beside it
#pragma unroll
  for (int two = 0; two < kUnitsOfABlock / 2; ++two) {
    const uint4 of_p = probabilities[32 * two], of_values = factors[two];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = 2 * two + half;
      uint32_t f[2] = {half == 0 ? of_values.x : of_values.z, half == 0 ? of_values.y : of_values.w}, more[2];
      if (kLarge) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int key = unit * CacheUnit::kKeys + 2 * t + 8 * k;
          const uint32_t both = *reinterpret_cast<const uint16_t*>(p + Shape::kScales + key);
          const uint32_t scales = sm90::permute_bytes(both, 0, 0x4140);
          f[k] = first_factors(scales), more[k] = second_factors(scales);
        }
      }
      uint32_t a[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = unit * Shape::kValueUnit + 8 * k * 16;
        const uint32_t w0 = *reinterpret_cast<const uint16_t*>(first + at);
        const uint32_t w1 = *reinterpret_cast<const uint16_t*>(second + at);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          a[2 * k + b] = sm90::multiply_pair(shifted_pair(w0, w1, b), f[k]);
          if (kLarge) a[2 * k + b] = sm90::multiply_pair(a[2 * k + b], more[k]);
        }
      }
      const uint32_t b[2] = {half == 0 ? of_p.x : of_p.z, half == 0 ? of_p.y : of_p.w};
      sm90::mma_bf16(d, a, b);
    }
  }
}

template <int kBlocks, class Shape = ClusterShape<kBlocks>>
JETRL_DEVICE void compute_output(const DecodeAttentionParams& p, uint8_t* memory,
                                 const ClusterBarriers<Shape>& barriers, uint16_t* out, int blocks, int rank,
                                 int warp) {
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  const int chunk = rank * Shape::kOutputWarps + warp;
  float d[4] = {};
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    const int ring = i & 1;
    const uint8_t* of_p = memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities;
    const uint8_t* values = memory + Shape::kValuesAt + stage * Shape::kValueStage + warp * CacheUnit::kChunk;
    sm90::barrier_wait(barriers.values_full(stage), parity, "values_full", stage);
    sm90::barrier_wait(barriers.p_full(ring), (i >> 1) & 1, "p_full", ring);
    if (i > 0) {
      const float2 rescale = reinterpret_cast<const float2*>(of_p + Shape::kRescale)[t];
      d[0] = sm90::multiply_ftz(d[0], rescale.x), d[1] = sm90::multiply_ftz(d[1], rescale.y);
      d[2] = sm90::multiply_ftz(d[2], rescale.x), d[3] = sm90::multiply_ftz(d[3], rescale.y);
    }
    if (word_at(of_p + Shape::kLarge) != 0) {
      add_chunk<Shape, true>(d, values, of_p, chunk % 2 != 0);
    } else {
      add_chunk<Shape, false>(d, values, of_p, chunk % 2 != 0);
    }
    sm90::sync_warp();
    if (arrives()) {
      sm90::barrier_arrive(barriers.p_empty(ring));
      sm90::barrier_arrive(barriers.values_empty(stage));
    }
    if (++stage == Shape::kValueStages) stage = 0, parity ^= 1;
  }
  const int ring = blocks & 1;
  sm90::barrier_wait(barriers.p_full(ring), (blocks >> 1) & 1, "p_full", ring);
  const uint8_t* last = memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities + Shape::kRescale;
  const float2 inverse = reinterpret_cast<const float2*>(last)[t];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float by = n == 0 ? inverse.x : inverse.y;
    const uint32_t two = sm90::pack_bf16(sm90::multiply_ftz(d[n], by), sm90::multiply_ftz(d[n + 2], by));
    const int query = 2 * t + n;
    if (query < p.group) *reinterpret_cast<uint32_t*>(out + query * 128 + 16 * chunk + 2 * g) = two;
  }
}

// ---- copies --------------------------------------------------------------------------------------------------------

// Where a unit of a request's lies, and how many of them a block of keys has.
struct Units {
  const DecodeAttentionParams& p;
  const int32_t* table;
  int head, blocks, count;

  JETRL_DEVICE int first(int i) const { return (blocks - 1 - i) * kUnitsOfABlock; }  // of the i-th block from the last
  JETRL_DEVICE int held(int i) const {
    const int left = count - first(i);
    return left < kUnitsOfABlock ? left : kUnitsOfABlock;
  }
  JETRL_DEVICE int page(int i, int unit) const {
    return i < blocks && unit < held(i) ? table[(first(i) + unit) / p.units] : 0;
  }
  JETRL_DEVICE const uint8_t* at(int page, int i, int unit) const {
    const int64_t index = (int64_t(page) * p.kv_heads + head) * p.units + (first(i) + unit) % p.units;
    return p.cache + index * CacheUnit::kBytes;
  }
};

template <int kBlocks, class Shape = ClusterShape<kBlocks>>
JETRL_DEVICE void copy_keys(uint32_t memory, const ClusterBarriers<Shape>& barriers, const Units& units, int rank) {
  const int lane = sm90::own_lane();
  int page = lane < kUnitsOfABlock ? units.page(rank, lane) : 0, stage = 0, parity = 0;
#pragma unroll 1
  for (int i = rank; i < units.blocks; i += kBlocks) {
    const int next = lane < kUnitsOfABlock ? units.page(i + kBlocks, lane) : 0, held = units.held(i);
    const bool is_reused = i >= kBlocks * Shape::kKeyStages;
    if (is_reused) sm90::barrier_wait(barriers.keys_empty(stage), parity ^ 1, "keys_empty", stage);
    sm90::sync_warp();
    if (sm90::elect_one()) sm90::barrier_arrive_expect(barriers.keys_full(stage), held * Shape::kKeyUnit);
    sm90::sync_warp();
    if (lane < held) {
      sm90::bulk_load(memory + stage * Shape::kKeyStage + lane * Shape::kKeyUnit, units.at(page, i, lane),
                      Shape::kKeyUnit, barriers.keys_full(stage));
    }
    page = next;
    if (++stage == Shape::kKeyStages) stage = 0, parity ^= 1;
  }
}

// Lanes know the pages of four blocks of keys at a time.
template <int kBlocks, class Shape = ClusterShape<kBlocks>>
JETRL_DEVICE void copy_values(uint32_t memory, const ClusterBarriers<Shape>& barriers, const Units& units, int rank) {
  constexpr int kAhead = 32 / kUnitsOfABlock;
  const int lane = sm90::own_lane(), unit = lane % kUnitsOfABlock, turn = lane / kUnitsOfABlock;
  int next = units.page(turn, unit), page = 0, stage = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < units.blocks; ++i) {
    if (i % kAhead == 0) page = next, next = units.page(i + kAhead + turn, unit);
    const int held = units.held(i);
    if (i >= Shape::kValueStages) sm90::barrier_wait(barriers.values_empty(stage), parity ^ 1, "values_empty", stage);
    sm90::sync_warp();
    if (sm90::elect_one()) sm90::barrier_arrive_expect(barriers.values_full(stage), held * Shape::kValueUnit);
    sm90::sync_warp();
    if (turn == i % kAhead && unit < held) {
      const uint8_t* values = units.at(page, i, unit) + CacheUnit::kValues + rank * Shape::kValueUnit;
      sm90::bulk_load(memory + Shape::kValuesAt + stage * Shape::kValueStage + unit * Shape::kValueUnit, values,
                      Shape::kValueUnit, barriers.values_full(stage));
    }
    if (++stage == Shape::kValueStages) stage = 0, parity ^= 1;
  }
}

template <int kBlocks>
JETRL_KERNEL void __launch_bounds__(ClusterShape<kBlocks>::kThreads, 2)
    decode_attention_cluster_kernel(JETRL_GRID_CONSTANT DecodeAttentionParams p) {
  using Shape = ClusterShape<kBlocks>;
  uint8_t* memory = sm90::dynamic_shared_memory();
  const int warp = sm90::warp_uniform(sm90::thread_index() / 32), rank = sm90::rank_in_cluster();
  const int pair = sm90::block_index() / kBlocks, head = pair % p.kv_heads, request = pair / p.kv_heads;
  const int length = p.lengths[request], blocks = ceil_div(length, kKeysOfABlock);
  const uint16_t* q = p.q + request * p.stride_q + int64_t(head) * p.group * 128;
  uint16_t* out = p.out + request * p.stride_out + int64_t(head) * p.group * 128;
  if (length <= 0) {  // of no request
    if (rank == 0) {
      for (int i = sm90::thread_index(); i < p.group * 128; i += Shape::kThreads) out[i] = 0;
    }
    return;
  }
  const ClusterBarriers<Shape> barriers{sm90::shared_address(memory + Shape::kBarriersAt)};
  if (sm90::thread_index() == 0) barriers.init(kBlocks, rank);
  sm90::sync_cluster();
  const Units units{p, p.table + request * p.stride_table, head, blocks, ceil_div(length, CacheUnit::kKeys)};
  if (warp < Shape::kScoreWarps) {
    compute_scores<kBlocks>(p, memory, barriers, q, blocks, rank, warp);
  } else if (warp < Shape::kSoftmaxWarp) {
    compute_output<kBlocks>(p, memory, barriers, out, blocks, rank, warp - Shape::kScoreWarps);
  } else if (warp < Shape::kKeyWarp) {
    compute_softmax<kBlocks>(p, memory, barriers, blocks, length, rank, warp - Shape::kSoftmaxWarp);
  } else if (warp == Shape::kKeyWarp) {
    copy_keys<kBlocks>(sm90::shared_address(memory), barriers, units, rank);
  } else {
    copy_values<kBlocks>(sm90::shared_address(memory), barriers, units, rank);
  }
  sm90::sync_cluster();  // what this block has sent is read from here until it has come
}

template <int kBlocks>
void start(const DecodeAttentionParams& params, int pairs, Stream stream) {
  using Shape = ClusterShape<kBlocks>;
  // Two that can have a multiprocessor each, which pairs of these always have room for, do not share one.
  const bool alone = kBlocks == 2 && pairs * kBlocks <= multiprocessors();
  const Grid grid{pairs * kBlocks, kBlocks, Shape::kThreads, alone ? kMoreThanHalf : Shape::kBytes, stream};
  launch<decode_attention_cluster_kernel<kBlocks>>(grid, params);
}

}  // namespace

void decode_attention_in_clusters(const DecodeAttentionParams& params, int pairs, int cluster, Stream stream) {
  if (cluster == 2) {
    start<2>(params, pairs, stream);
  } else if (cluster == 4) {
    start<4>(params, pairs, stream);
  } else if (cluster == 8) {
    start<8>(params, pairs, stream);
  } else {
    const std::string blocks = std::to_string(cluster);
    refuse("decode attention by clusters of " + blocks + " blocks is not supported. Set 1, 2, 4 or 8.");
  }
}

}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode attention by C = 1, 2, 4 or 8 blocks, a cluster, for each request and KV head: for calls with fewer of these
// than the GPU holds blocks, and for a BF16 cache. The arithmetic and its order are those of sm90_decode_attention.cu,
// whatever C, so the bits are.
//
// Each byte is brought once. Block r brings the keys of every C-th block of 128 keys and computes their scores, which
// the copy engine sends to the other blocks' shared memory, after the values' scales; of values it brings its
// own 128 / C features, 16 bytes a lane: a bulk copy of 256 bytes costs the warp that starts it what one of 2,048 does.
// Each block computes the softmax, one chain over all keys, from the same scores.

#pragma once

#include "decode_attention.cuh"

namespace jetrl {

// Warps 0..3: scores of two units of 16 keys each. Then those of O, of 16 features each, or of 32. Then two or four of
// softmax, lane 4q + t of query q, in turn: each hands over the maximum before it computes P, the sum after it. Then
// copies of keys, then of values. Between them: rings of keys, of values, of scores (a multiple of C long, so that a
// place in it has one owner, for whose next scores every block makes it free), of P, one a warp of softmax, and of what
// values are multiplied by, two a warp of softmax: they are there before P is. No block leaves before all have what it
// sends.
//
// O is one chain of products over all keys. Of a block that has a multiprocessor to itself two warps have the same
// features and take turns: while one multiplies a block of keys, the other brings the next one's values to registers,
// as operands, and then waits for the sums. They go through shared memory as they are.
//
// What a cache is, its copies and its operands, is a class (Fp8Cache, Bf16Cache):
//   kBlocks                             C
//   kTurns                              warps of O that take turns: 2 where a block has a multiprocessor to itself
//   kGainsByTurns                       whether a block that has a multiprocessor to itself is faster by them
//   Params                              DecodeAttentionParams and where the cache is
//   kHasScales                          whether values have scales, which come with their keys
//   kPieces                             stages that the keys, and the values, of a block of 128 take
//   kKeyStages, kKeyStage, kValueStages, kValueStage, kPlaces     stages and their bytes; places of scores
//   kOutputWarps, kChunks               warps of O in a turn and how many times 16 features each has
//   kSoftmaxWarps                       warps of softmax
//   kKeyWarps, kKeyArrivals             warps that copy keys; arrivals that a full stage has of them
//   part_of, unit_of_part               which warp has a unit's scores, and as which of its two
//   Queries, multiply                   Q as an operand; K Q^T
//   accumulate                          O += V^T P^T of all blocks of keys, where there are no turns
//   place_of_lane, load_values          where a lane's values lie in a stage; those of a block of keys, as operands
//   store                               two features of a query to memory
//   copy_keys                           of all blocks of keys
//   place_of_unit, copy_values          where a unit lies; a piece's values
template <class Cache>
struct ClusterShape {
  static constexpr int kBlocks = Cache::kBlocks;
  static constexpr int kScoreWarps = 4, kOutputWarps = Cache::kOutputWarps, kSoftmaxWarps = Cache::kSoftmaxWarps;
  static constexpr int kTurns = Cache::kTurns, kResidents = kTurns == 1 ? 2 : 1;  // blocks of a multiprocessor
  static constexpr int kSoftmaxWarp = kScoreWarps + kTurns * kOutputWarps;
  static constexpr int kKeyWarp = kSoftmaxWarp + kSoftmaxWarps, kValueWarp = kKeyWarp + Cache::kKeyWarps;
  static constexpr int kThreads = 32 * (kValueWarp + 1);
  // What a warp has computed: its values' scales, then a row of scores of each query. Rows lie in different banks.
  static constexpr int kPartKeys = 2 * CacheUnit::kKeys, kPartScales = Cache::kHasScales ? kPartKeys : 0;
  static constexpr int kScoreRow = kPartKeys + 8;
  static constexpr int kPart = kPartScales + kQueries * kScoreRow * 4;
  static constexpr int kPlaces = Cache::kPlaces, kScores = kScoreWarps * kPart;
  // P and the rescaling.
  static constexpr int kRescale = kQueries * kKeysOfABlock * 2, kProbabilities = kRescale + kQueries * 4;
  // What values are multiplied by, a row for each lane of a quad; where a scale is large, the scales in their place,
  // which is said after the last row's.
  static constexpr int kFactorRow = 20, kLarge = (3 * kFactorRow + kKeysOfABlock / 8) * 4;
  static constexpr int kFactors = Cache::kHasScales ? 4 * kFactorRow * 4 : 0;
  // A warp of softmax writes those of a block of keys once O has the P that it wrote two rounds ago.
  static constexpr int kFactorPlaces = Cache::kHasScales ? 2 * kSoftmaxWarps : 0;
  static constexpr int kHandedOver = (kQueries + 32) * 4;  // by a softmax warp: maxima of queries, sums of lanes
  // By a warp of O: what its lanes have. The next one reads it before it hands over its own, which this one waits for.
  static constexpr int kOutputs = kTurns == 1 ? 0 : kTurns * kOutputWarps, kOutput = 32 * 16;

  static constexpr int kValuesAt = Cache::kKeyStages * Cache::kKeyStage;
  static constexpr int kScoresAt = kValuesAt + Cache::kValueStages * Cache::kValueStage;
  static constexpr int kProbabilitiesAt = kScoresAt + kPlaces * kScores;
  static constexpr int kFactorsAt = kProbabilitiesAt + kSoftmaxWarps * kProbabilities;
  static constexpr int kHandedOverAt = kFactorsAt + kFactorPlaces * kFactors;
  static constexpr int kOutputsAt = kHandedOverAt + kSoftmaxWarps * kHandedOver;
  static constexpr int kBarriersAt = kOutputsAt + kOutputs * kOutput;
  static constexpr int kBarriers =
      2 * (Cache::kKeyStages + Cache::kValueStages + kPlaces) + 4 * kSoftmaxWarps + kFactorPlaces + kOutputs;
  static constexpr int kBytes = kBarriersAt + 8 * kBarriers;
  // A wait names a phase by its parity: a place's scores are one warp's of softmax in every lap.
  static_assert(kPlaces % kSoftmaxWarps == 0, "a place of scores has one reader");
  static_assert(Cache::kValueStages % (kTurns * Cache::kPieces) == 0 || kTurns == 1, "a stage of values has one turn");
  static_assert(kTurns == 1 || Cache::kGainsByTurns);
  static_assert(kSoftmaxWarps % kTurns == 0, "a warp of softmax writes P for one turn");
  static_assert(kOutputsAt % 16 == 0, "sums are moved 16 bytes at a time");
  static_assert(kTurns == 1 || kBytes > 228 * 1024 / 2 - 1024, "a block with turns has a multiprocessor to itself");
  static_assert(kPlaces % kBlocks == 0 && kBytes <= 228 * 1024 / kResidents - 1024, "blocks of a multiprocessor");
};

// At a stage that the lanes of a warp fill: each lane's after its copies, and the warp's.
constexpr int kArrivalsOfLanes = 32 + kArrivals;

// Where a warp is in a ring.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  JETRL_DEVICE void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  JETRL_DEVICE void skip(int stages) {
    if ((stage += stages) >= kStages) stage -= kStages, parity ^= 1;
  }
};

template <class Cache>
struct ClusterBarriers {
  using Shape = ClusterShape<Cache>;
  uint32_t first;

  JETRL_DEVICE uint32_t keys_full(int stage) const { return first + 8 * stage; }
  JETRL_DEVICE uint32_t keys_empty(int stage) const { return keys_full(Cache::kKeyStages + stage); }
  JETRL_DEVICE uint32_t values_full(int stage) const { return keys_full(2 * Cache::kKeyStages + stage); }
  JETRL_DEVICE uint32_t values_empty(int stage) const { return values_full(Cache::kValueStages + stage); }
  JETRL_DEVICE uint32_t scores_full(int place) const { return values_full(2 * Cache::kValueStages + place); }
  JETRL_DEVICE uint32_t scores_empty(int place) const { return scores_full(Shape::kPlaces + place); }
  JETRL_DEVICE uint32_t p_full(int i) const { return scores_full(2 * Shape::kPlaces + i); }
  JETRL_DEVICE uint32_t p_empty(int i) const { return p_full(Shape::kSoftmaxWarps + i); }
  JETRL_DEVICE uint32_t max_full(int i) const { return p_full(2 * Shape::kSoftmaxWarps + i); }
  JETRL_DEVICE uint32_t sum_full(int i) const { return p_full(3 * Shape::kSoftmaxWarps + i); }
  JETRL_DEVICE uint32_t factors_full(int place) const { return p_full(4 * Shape::kSoftmaxWarps + place); }
  JETRL_DEVICE uint32_t output_full(int warp) const { return factors_full(Shape::kFactorPlaces + warp); }

  JETRL_DEVICE void init(int rank) const {
    for (int stage = 0; stage < Cache::kKeyStages; ++stage) {
      sm90::barrier_init(keys_full(stage), Cache::kKeyArrivals);
      sm90::barrier_init(keys_empty(stage), kArrivals * Shape::kScoreWarps);
    }
    for (int stage = 0; stage < Cache::kValueStages; ++stage) {
      sm90::barrier_init(values_full(stage), kArrivalsOfLanes);
      sm90::barrier_init(values_empty(stage), kArrivals * Shape::kOutputWarps);
    }
    for (int place = 0; place < Shape::kPlaces; ++place) {
      // The own warps that write here, or who says how many bytes come from another block.
      sm90::barrier_init(scores_full(place), place % Cache::kBlocks == rank ? kArrivals * Shape::kScoreWarps : 1);
      sm90::barrier_init(scores_empty(place), kArrivals * Cache::kBlocks);
    }
    for (int i = 0; i < Shape::kSoftmaxWarps; ++i) {
      sm90::barrier_init(p_full(i), kArrivals);
      sm90::barrier_init(p_empty(i), kArrivals * Shape::kOutputWarps);
      sm90::barrier_init(max_full(i), kArrivals);
      sm90::barrier_init(sum_full(i), kArrivals);
    }
    for (int place = 0; place < Shape::kFactorPlaces; ++place) sm90::barrier_init(factors_full(place), kArrivals);
    for (int warp = 0; warp < Shape::kOutputs; ++warp) sm90::barrier_init(output_full(warp), kArrivals);
    sm90::fence_barrier_init();
  }
};

// Bytes of a warp's part that are sent.
template <class Shape>
JETRL_DEVICE int part_bytes(int group) {
  return Shape::kPartScales + group * Shape::kScoreRow * 4;
}

// ---- scores --------------------------------------------------------------------------------------------------------

template <class Cache>
JETRL_DEVICE void compute_scores(const DecodeAttentionParams& p, uint8_t* memory, const ClusterBarriers<Cache>& barriers,
                                 const uint16_t* q, int blocks, int rank, int warp) {
  using Shape = ClusterShape<Cache>;
  constexpr int kBlocks = Cache::kBlocks;
  const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
  typename Cache::Queries queries;
  queries.load(q, p.group);
  Place<Cache::kKeyStages> keys;
#pragma unroll 1
  for (int i = rank; i < blocks; i += kBlocks) {
    const int place = i % Shape::kPlaces, lap = i / Shape::kPlaces;
    const uint8_t* pieces[Cache::kPieces];
    uint32_t empty[Cache::kPieces];
#pragma unroll
    for (int piece = 0; piece < Cache::kPieces; ++piece) {
      sm90::barrier_wait(barriers.keys_full(keys.stage), keys.parity, "keys_full", keys.stage);
      pieces[piece] = memory + keys.stage * Cache::kKeyStage;
      empty[piece] = barriers.keys_empty(keys.stage);
      keys.advance();
    }
    float d[2][4] = {};
    Cache::multiply(d, pieces, queries, warp);
    uint32_t scales = 0;
    if constexpr (Cache::kHasScales) {
      if (lane < 8) scales = Cache::four_scales(pieces[0], 2 * warp + lane / 4, lane % 4);
    }
    if (lap > 0) sm90::barrier_wait(barriers.scores_empty(place), (lap - 1) & 1, "scores_empty", place);
    uint8_t* part = memory + Shape::kScoresAt + place * Shape::kScores + warp * Shape::kPart;
    if (Cache::kHasScales && lane < 8) *reinterpret_cast<uint32_t*>(part + 4 * lane) = scales;
    float* scores = reinterpret_cast<float*>(part + Shape::kPartScales);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      float* to = scores + 2 * t * Shape::kScoreRow + 16 * unit + g;
      to[0] = d[unit][0], to[Shape::kScoreRow] = d[unit][1];
      to[8] = d[unit][2], to[Shape::kScoreRow + 8] = d[unit][3];
    }
    if constexpr (kBlocks > 1) sm90::fence_for_copies();
    sm90::sync_warp();
    if (kBlocks > 1 && sm90::elect_one()) {
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
#pragma unroll
      for (int piece = 0; piece < Cache::kPieces; ++piece) sm90::barrier_arrive(empty[piece]);
    }
  }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// What values are multiplied by, of a block of keys, of which a lane has the scales of four.
template <class Shape>
JETRL_DEVICE void store_factors(uint8_t* to, uint32_t scales) {
  const int lane = sm90::own_lane();
  const uint32_t pairs[2] = {sm90::permute_bytes(scales, 0, 0x4140), sm90::permute_bytes(scales, 0, 0x4342)};
  const bool large = sm90::count_true((larger_scales(pairs[0]) | larger_scales(pairs[1])) != 0) != 0;
  if (large) {
    reinterpret_cast<uint32_t*>(to)[lane] = scales;
  } else {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int pair = 2 * (lane % 4) + b;  // of a unit's eight: that of lane pair % 4 of a quad, first or second
      const int word = pair % 4 * Shape::kFactorRow + 2 * (lane / 4) + pair / 4;
      reinterpret_cast<uint32_t*>(to)[word] = factors_of(pairs[b]);
    }
  }
  if (lane == 0) *reinterpret_cast<uint32_t*>(to + Shape::kLarge) = large;
}

template <class Cache>
JETRL_DEVICE void compute_softmax(const DecodeAttentionParams& p, uint8_t* memory,
                                  const ClusterBarriers<Cache>& barriers, int blocks, int length, int rank, int warp) {
  using Shape = ClusterShape<Cache>;
  constexpr int kBlocks = Cache::kBlocks, kWarps = Shape::kSoftmaxWarps;
  const int lane = sm90::own_lane(), query = lane / 4, t = lane % 4, other = (warp + kWarps - 1) % kWarps;
  const int left = length - (blocks - 1) * kKeysOfABlock;
  float* mine = reinterpret_cast<float*>(memory + Shape::kHandedOverAt + warp * Shape::kHandedOver);
  const float* theirs = reinterpret_cast<const float*>(memory + Shape::kHandedOverAt + other * Shape::kHandedOver);
  uint8_t* to = memory + Shape::kProbabilitiesAt + warp * Shape::kProbabilities;
  float row_sum = 0;
#pragma unroll 1
  for (int i = warp; i < blocks; i += kWarps) {
    const int place = i % Shape::kPlaces, owner = i % kBlocks, lap = i / kWarps, handed = (i + kWarps - 1) / kWarps - 1;
    if (owner != rank && sm90::elect_one()) {
      sm90::barrier_arrive_expect(barriers.scores_full(place), Shape::kScoreWarps * part_bytes<Shape>(p.group));
    }
    sm90::barrier_wait(barriers.scores_full(place), i / Shape::kPlaces & 1, "scores_full", place);
    const uint8_t* parts = memory + Shape::kScoresAt + place * Shape::kScores;
    float s[32];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint8_t* at = parts + Cache::part_of(j / 2) * Shape::kPart + Shape::kPartScales;
      const int key = 16 * Cache::unit_of_part(j / 2) + 8 * (j % 2) + 2 * t;
      const float2 two = *reinterpret_cast<const float2*>(at + 4 * (query * Shape::kScoreRow + key));
      s[2 * j] = two.x, s[2 * j + 1] = two.y;
    }
    uint32_t scales = 0;  // of keys 4 lane ..
    if constexpr (Cache::kHasScales) scales = word_at(parts + lane / 8 * Shape::kPart + lane % 8 * 4);
    sm90::sync_warp();
    // Only where the owner waits for it, so that none comes to a block that has left.
    if (i + Shape::kPlaces < blocks && arrives()) {
      if constexpr (kBlocks == 1) {
        sm90::barrier_arrive(barriers.scores_empty(place));
      } else {
        sm90::barrier_arrive_in_cluster(sm90::address_in_cluster(barriers.scores_empty(place), owner));
      }
    }
    if (i == 0) {
      mask_scores(s, left - 2 * t);
      if constexpr (Cache::kHasScales) {
        // P is 0 for keys after the last, whose bytes may be anything: a scale among them is replaced.
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if (4 * lane + b >= left) scales = (scales & ~(0xFFu << 8 * b)) | 127u << 8 * b;
        }
      }
    }
    if constexpr (Cache::kHasScales) {
      const int factor_place = i % Shape::kFactorPlaces;
      store_factors<Shape>(memory + Shape::kFactorsAt + factor_place * Shape::kFactors, scales);
      sm90::sync_warp();
      if (arrives()) sm90::barrier_arrive(barriers.factors_full(factor_place));
    }

    float highest = largest_of_quad(largest_score(s)), before = 0;
    if (i > 0) {
      sm90::barrier_wait(barriers.max_full(other), handed & 1, "max_full", other);
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
    if (lap > 0) sm90::barrier_wait(barriers.p_empty(warp), (lap - 1) & 1, "p_empty", warp);
    store_probabilities(to, words);
    if (t == 0) reinterpret_cast<float*>(to + Shape::kRescale)[query] = rescale;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.p_full(warp));

    if (i > 0) {
      sm90::barrier_wait(barriers.sum_full(other), handed & 1, "sum_full", other);
      row_sum = theirs[kQueries + lane];
    }
    row_sum = add_to_sum(row_sum, rescale, s, i == 0);
    mine[kQueries + lane] = row_sum;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.sum_full(warp));
  }
  if (warp != (blocks - 1) % kWarps) return;  // the last block's has all of the sum
  const float inverse = last_rescaling(row_sum);
  const int next = blocks % kWarps, lap = blocks / kWarps;
  if (lap > 0) sm90::barrier_wait(barriers.p_empty(next), (lap - 1) & 1, "p_empty", next);
  to = memory + Shape::kProbabilitiesAt + next * Shape::kProbabilities;
  if (t == 0) reinterpret_cast<float*>(to + Shape::kRescale)[query] = inverse;
  sm90::sync_warp();
  if (arrives()) sm90::barrier_arrive(barriers.p_full(next));
}

// ---- output --------------------------------------------------------------------------------------------------------

// Where P of the i-th block lies, once it is there.
template <class Cache>
JETRL_DEVICE const uint8_t* wait_for_probabilities(const uint8_t* memory, const ClusterBarriers<Cache>& barriers,
                                                   int i) {
  using Shape = ClusterShape<Cache>;
  constexpr int kWarps = Shape::kSoftmaxWarps;
  const int ring = i % kWarps;
  sm90::barrier_wait(barriers.p_full(ring), i / kWarps & 1, "p_full", ring);
  return memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities;
}

// By what O so far is multiplied, of a lane's two queries: it comes with P.
template <class Shape>
JETRL_DEVICE float2 rescaling_of(const uint8_t* of_p) {
  return reinterpret_cast<const float2*>(of_p + Shape::kRescale)[sm90::own_lane() % 4];
}

template <class Cache>
JETRL_DEVICE void rescale_output(float (&d)[Cache::kChunks][4], float2 rescale) {
#pragma unroll
  for (int c = 0; c < Cache::kChunks; ++c) {
    d[c][0] = sm90::multiply_ftz(d[c][0], rescale.x), d[c][1] = sm90::multiply_ftz(d[c][1], rescale.y);
    d[c][2] = sm90::multiply_ftz(d[c][2], rescale.x), d[c][3] = sm90::multiply_ftz(d[c][3], rescale.y);
  }
}

// O += V^T P^T of the blocks of keys of this warp's turn. What does not need O so far is done before it is waited for.
// Returns whether the last block of keys, and with it O, is this warp's.
template <class Cache>
JETRL_DEVICE bool accumulate_in_turns(float (&d)[1][4], uint8_t* memory, const ClusterBarriers<Cache>& barriers,
                                      int blocks, int warp, int chunk) {
  using Shape = ClusterShape<Cache>;
  constexpr int kTurns = Cache::kTurns, kWarps = Shape::kOutputWarps;
  const int lane = sm90::own_lane(), turn = warp / kWarps, other = (warp + (kTurns - 1) * kWarps) % (kTurns * kWarps);
  const uint32_t of_lane = Cache::place_of_lane(memory, warp % kWarps, chunk);
  float4* mine = reinterpret_cast<float4*>(memory + Shape::kOutputsAt + warp * Shape::kOutput) + lane;
  const float4* theirs = reinterpret_cast<const float4*>(memory + Shape::kOutputsAt + other * Shape::kOutput) + lane;
  Place<Cache::kValueStages> values;
  values.skip(turn * Cache::kPieces);
#pragma unroll 1
  for (int i = turn; i < blocks; i += kTurns) {
    uint32_t a[kUnitsOfABlock][4];
    Cache::load_values(a, memory, barriers, values, i, of_lane);
    values.skip((kTurns - 1) * Cache::kPieces);
    const uint8_t* of_p = wait_for_probabilities<Cache>(memory, barriers, i);
    const float2 rescale = rescaling_of<Shape>(of_p);
    uint4 p[kUnitsOfABlock / 2];
#pragma unroll
    for (int two = 0; two < kUnitsOfABlock / 2; ++two) p[two] = reinterpret_cast<const uint4*>(of_p)[32 * two + lane];
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.p_empty(i % Shape::kSoftmaxWarps));
    if (i > 0) {
      sm90::barrier_wait(barriers.output_full(other), (i - 1) / kTurns & 1, "output_full", other);
      const float4 so_far = *theirs;
      d[0][0] = so_far.x, d[0][1] = so_far.y, d[0][2] = so_far.z, d[0][3] = so_far.w;
      rescale_output<Cache>(d, rescale);
    }
#pragma unroll
    for (int unit = 0; unit < kUnitsOfABlock; ++unit) {
      const uint4 two = p[unit / 2];
      const uint32_t b[2] = {unit % 2 == 0 ? two.x : two.z, unit % 2 == 0 ? two.y : two.w};
      sm90::mma_bf16(d[0], a[unit], b);
    }
    if (i + 1 == blocks) return true;
    *mine = float4{d[0][0], d[0][1], d[0][2], d[0][3]};
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.output_full(warp));
  }
  return false;
}

template <class Cache>
JETRL_DEVICE void compute_output(const DecodeAttentionParams& p, uint8_t* memory, const ClusterBarriers<Cache>& barriers,
                                 uint16_t* out, int blocks, int rank, int warp) {
  using Shape = ClusterShape<Cache>;
  const int t = sm90::own_lane() % 4, in_turn = Cache::kTurns == 1 ? warp : warp % Shape::kOutputWarps;
  const int chunk = rank * (8 / Cache::kBlocks) + in_turn * Cache::kChunks;
  float d[Cache::kChunks][4] = {};
  if constexpr (Cache::kTurns == 1) {
    Cache::accumulate(d, memory, barriers, blocks, warp, chunk);
  } else {
    if (!accumulate_in_turns<Cache>(d, memory, barriers, blocks, warp, chunk)) return;
  }
  // After the last block's comes what O is multiplied by at the end.
  const float2 inverse = rescaling_of<Shape>(wait_for_probabilities<Cache>(memory, barriers, blocks));
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float by = n == 0 ? inverse.x : inverse.y;
    const int query = 2 * t + n;
#pragma unroll
    for (int c = 0; c < Cache::kChunks; ++c) {
      const uint32_t two = sm90::pack_bf16(sm90::multiply_ftz(d[c][n], by), sm90::multiply_ftz(d[c][n + 2], by));
      if (query < p.group) Cache::store(out + query * 128 + 16 * (chunk + c), two);
    }
  }
}

// ---- copies --------------------------------------------------------------------------------------------------------

// Which units of 16 tokens a block of keys has, and on which page of a request's they lie.
struct Units {
  const int32_t* table;
  int of_a_page, head, blocks, length;

  JETRL_DEVICE int first(int i) const { return (blocks - 1 - i) * kUnitsOfABlock; }  // of the i-th block from the last
  JETRL_DEVICE int keys(int i) const { return length - first(i) * CacheUnit::kKeys; }  // that are left, from there on
  JETRL_DEVICE int held(int i) const {
    const int left = ceil_div(keys(i), CacheUnit::kKeys);
    return left < kUnitsOfABlock ? left : kUnitsOfABlock;
  }
  JETRL_DEVICE int page(int i, int unit) const {
    return i < blocks && unit < held(i) ? table[(first(i) + unit) / of_a_page] : 0;
  }
  JETRL_DEVICE int on_page(int i, int unit) const { return (first(i) + unit) % of_a_page; }
};

// Of values lanes know the pages of so many blocks of keys at a time; of keys the first lanes know those of one.
constexpr int kBlocksAhead = 32 / kUnitsOfABlock;

// Every lane's copies, and that the warp has seen the stage empty: an arrival after copies tells nothing but those.
JETRL_DEVICE void arrive_behind_copies(uint32_t full) {
  sm90::cp_async_arrive(full);
  if (arrives()) sm90::barrier_arrive(full);
}

// A block's values, by the lanes of one warp. What a unit's place counts is the cache's; a lane knows one of it, so
// that no address is a product of a page's but once.
template <class Cache>
JETRL_DEVICE void copy_values(const typename Cache::Params& p, uint32_t to, const ClusterBarriers<Cache>& barriers,
                              const Units& units, int page, int rank) {
  const int unit = sm90::own_lane() % kUnitsOfABlock, turn = sm90::own_lane() / kUnitsOfABlock;
  int of_units = 0;
  Place<Cache::kValueStages> values;
#pragma unroll 1
  for (int i = 0; i < units.blocks; ++i) {
    if (i % kBlocksAhead == 0) {
      of_units = Cache::place_of_unit(p, units, page, i + turn, unit);
      page = units.page(i + kBlocksAhead + turn, unit);
    }
    const int known = i % kBlocksAhead * kUnitsOfABlock, left = units.keys(i);
#pragma unroll 1
    for (int piece = 0; piece < Cache::kPieces; ++piece) {
      sm90::barrier_wait(barriers.values_empty(values.stage), values.parity ^ 1, "values_empty", values.stage);
      Cache::copy_values(p, to + values.stage * Cache::kValueStage, units, of_units, known, left, piece, rank);
      arrive_behind_copies(barriers.values_full(values.stage));
      values.advance();
    }
  }
}

template <class Cache>
JETRL_KERNEL void __launch_bounds__(ClusterShape<Cache>::kThreads, ClusterShape<Cache>::kResidents)
    decode_attention_cluster_kernel(JETRL_GRID_CONSTANT typename Cache::Params p) {
  using Shape = ClusterShape<Cache>;
  constexpr int kBlocks = Cache::kBlocks;
  uint8_t* memory = sm90::dynamic_shared_memory();
  const int warp = sm90::warp_uniform(sm90::thread_index() / 32), rank = kBlocks == 1 ? 0 : sm90::rank_in_cluster();
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
  const ClusterBarriers<Cache> barriers{sm90::shared_address(memory + Shape::kBarriersAt)};
  if (sm90::thread_index() == 0) barriers.init(rank);
  const Units units{p.table + request * p.stride_table, p.units, head, blocks, length};
  int pages = 0;  // asked for before the others of the cluster are waited for
  if (warp >= Shape::kKeyWarp) {
    const int lane = sm90::own_lane();
    pages = units.page(warp < Shape::kValueWarp ? rank : lane / kUnitsOfABlock, lane % kUnitsOfABlock);
  }
  sync_cluster_or_block<kBlocks>();
  if (warp < Shape::kScoreWarps) {
    compute_scores<Cache>(p, memory, barriers, q, blocks, rank, warp);
  } else if (warp < Shape::kSoftmaxWarp) {
    compute_output<Cache>(p, memory, barriers, out, blocks, rank, warp - Shape::kScoreWarps);
  } else if (warp < Shape::kKeyWarp) {
    compute_softmax<Cache>(p, memory, barriers, blocks, length, rank, warp - Shape::kSoftmaxWarp);
  } else if (warp < Shape::kValueWarp) {
    Cache::copy_keys(p, sm90::shared_address(memory), barriers, units, pages, rank, warp - Shape::kKeyWarp);
  } else {
    copy_values<Cache>(p, sm90::shared_address(memory + Shape::kValuesAt), barriers, units, pages, rank);
  }
  if constexpr (kBlocks > 1) sm90::sync_cluster();  // what this block has sent is read from here until it has come
}

// Where all clusters find multiprocessors of their own, warps of O take turns, if that is faster.
template <template <int, int> class Cache, int kBlocks, class Params>
void start_cluster(const Params& params, int pairs, Stream stream) {
  const auto grid = [&](auto cache) {
    using Shape = ClusterShape<decltype(cache)>;
    return Grid{pairs * kBlocks, kBlocks, Shape::kThreads, Shape::kBytes, stream};
  };
  using Sharing = Cache<kBlocks, 1>;
  if constexpr (kBlocks > 1 && Sharing::kGainsByTurns) {
    using Alone = Cache<kBlocks, 2>;
    constexpr auto kKernel = decode_attention_cluster_kernel<Alone>;
    if (pairs <= clusters_at_once<kKernel>(grid(Alone{}))) return launch<kKernel>(grid(Alone{}), params);
  }
  launch<decode_attention_cluster_kernel<Sharing>>(grid(Sharing{}), params);
}

[[noreturn]] inline void refuse_cluster(int cluster) {
  const std::string blocks = std::to_string(cluster);
  refuse("decode attention by clusters of " + blocks + " blocks is not supported. Set 1, 2, 4 or 8.");
}

}  // namespace jetrl

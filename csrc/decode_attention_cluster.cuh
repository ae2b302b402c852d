// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode attention by clusters of C = 1, 2, 4 or 8 blocks, one for each request and KV head: for calls with fewer of
// these than the GPU holds blocks, and for a BF16 cache. Arithmetic, its order and bits are those of
// sm90_decode_attention.cu for every C.
//
// Each byte is read once. Block r loads the keys of every C-th block of 128 keys and computes their scores, which the
// copy engine sends, with the values' scales, to the other blocks' shared memory. Of values it loads its own 128 / C
// features, 16 bytes a lane: a bulk copy of 256 bytes costs its warp as much as one of 2,048. Each block computes the
// softmax, one chain over all keys, from the same scores.

#pragma once

#include "decode_attention.cuh"

namespace jetrl {

// Warps 0..3: scores of two units of 16 keys each. Next, warps of O: 16 or 32 features each. Next, two or four warps of
// softmax, lane 4q + t of query q, in turn: each hands over the maximum before it computes P, the sum after it. Last,
// copies of keys, then of values. Between them rings of keys, of values, of scores (a multiple of C long, so that a
// place has one owner, for which every block frees it), of P, one per warp of softmax, and of the factors of values,
// two per warp of softmax, ready before P. No block exits before all have received what it sends.
//
// O is one chain of products over all keys. If a block has a multiprocessor to itself, two warps have the same features
// and take turns: while one multiplies a block of keys, the other loads the next one's values into registers, as
// operands, and then waits for the sums, which go through shared memory.
//
// A class (Fp8Cache, Bf16Cache) defines the cache, its copies and its operands:
//   kBlocks                             C
//   kTurns                              warps of O that take turns: 2 where a block has a multiprocessor to itself
//   kGainsByTurns                       whether turns are faster there
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
  // A warp's results: its values' scales, then a row of scores for each query. Rows lie in different banks.
  static constexpr int kPartKeys = 2 * CacheUnit::kKeys, kPartScales = Cache::kHasScales ? kPartKeys : 0;
  static constexpr int kScoreRow = kPartKeys + 8;
  static constexpr int kPart = kPartScales + kQueries * kScoreRow * 4;
  static constexpr int kPlaces = Cache::kPlaces, kScores = kScoreWarps * kPart;
  // P and the rescaling.
  static constexpr int kRescale = kQueries * kKeysOfABlock * 2, kProbabilities = kRescale + kQueries * 4;
  // Factors of values, a row for each lane of a quad. Where a scale is large, the scales instead, and a flag after the
  // last row.
  static constexpr int kFactorRow = 20, kLarge = (3 * kFactorRow + kKeysOfABlock / 8) * 4;
  static constexpr int kFactors = Cache::kHasScales ? 4 * kFactorRow * 4 : 0;
  // A warp of softmax writes the factors of a block of keys once O has read the P that it wrote two rounds ago.
  static constexpr int kFactorPlaces = Cache::kHasScales ? 2 * kSoftmaxWarps : 0;
  static constexpr int kHandedOver = (kQueries + 32) * 4;  // by a softmax warp: maxima of queries, sums of lanes
  // Sums of a warp of O. The next warp reads them before it hands over its own, for which this one waits.
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
  // A wait names a phase by its parity, so the same warp of softmax reads a place of scores in every lap.
  static_assert(kPlaces % kSoftmaxWarps == 0, "a place of scores has one reader");
  static_assert(Cache::kValueStages % (kTurns * Cache::kPieces) == 0 || kTurns == 1, "a stage of values has one turn");
  static_assert(kTurns == 1 || Cache::kGainsByTurns);
  static_assert(kSoftmaxWarps % kTurns == 0, "a warp of softmax writes P for one turn");
  static_assert(kOutputsAt % 16 == 0, "sums are moved 16 bytes at a time");
  static_assert(kTurns == 1 || kBytes > 228 * 1024 / 2 - 1024, "a block with turns has a multiprocessor to itself");
  static_assert(kPlaces % kBlocks == 0 && kBytes <= 228 * 1024 / kResidents - 1024, "blocks of a multiprocessor");
};

// Arrivals at a stage that a warp fills: one of each lane after its copies, and the warp's.
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
      // This block's warps that write here, or the one that announces the bytes of another block.
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

// Bytes of a warp's results that are sent.
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

// Stores the factors of the values of a block of keys; a lane has the scales of four.
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
    // Only where the owner waits for it, so that no arrival goes to a block that has exited.
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
        // P is 0 for keys after the last, whose bytes are arbitrary, so their scales are replaced.
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
  if (warp != (blocks - 1) % kWarps) return;  // the warp of the last block has the whole sum
  const float inverse = last_rescaling(row_sum);
  const int next = blocks % kWarps, lap = blocks / kWarps;
  if (lap > 0) sm90::barrier_wait(barriers.p_empty(next), (lap - 1) & 1, "p_empty", next);
  to = memory + Shape::kProbabilitiesAt + next * Shape::kProbabilities;
  if (t == 0) reinterpret_cast<float*>(to + Shape::kRescale)[query] = inverse;
  sm90::sync_warp();
  if (arrives()) sm90::barrier_arrive(barriers.p_full(next));
}

// ---- output --------------------------------------------------------------------------------------------------------

// Waits for P of the i-th block and returns where it lies.
template <class Cache>
JETRL_DEVICE const uint8_t* wait_for_probabilities(const uint8_t* memory, const ClusterBarriers<Cache>& barriers,
                                                   int i) {
  using Shape = ClusterShape<Cache>;
  constexpr int kWarps = Shape::kSoftmaxWarps;
  const int ring = i % kWarps;
  sm90::barrier_wait(barriers.p_full(ring), i / kWarps & 1, "p_full", ring);
  return memory + Shape::kProbabilitiesAt + ring * Shape::kProbabilities;
}

// The factors of O so far for a lane's two queries, which come with P.
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

// O += V^T P^T of the blocks of keys of this warp's turn. Work that does not need O so far comes before the wait for
// it. Returns whether this warp has the last block of keys, and so O.
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
  // After the last block's factor comes the final one.
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

// The units of 16 tokens of a block of keys, and their pages.
struct Units {
  const int32_t* table;
  int of_a_page, head, blocks, length;

  JETRL_DEVICE int first(int i) const { return (blocks - 1 - i) * kUnitsOfABlock; }  // of the i-th block from the last
  JETRL_DEVICE int keys(int i) const { return length - first(i) * CacheUnit::kKeys; }  // left from there on
  JETRL_DEVICE int held(int i) const {
    const int left = ceil_div(keys(i), CacheUnit::kKeys);
    return left < kUnitsOfABlock ? left : kUnitsOfABlock;
  }
  JETRL_DEVICE int page(int i, int unit) const {
    return i < blocks && unit < held(i) ? table[(first(i) + unit) / of_a_page] : 0;
  }
  JETRL_DEVICE int on_page(int i, int unit) const { return (first(i) + unit) % of_a_page; }
};

// Blocks of keys whose pages the lanes know at a time when they copy values; for keys the first lanes know one block's.
constexpr int kBlocksAhead = 32 / kUnitsOfABlock;

// Arrives for every lane's copies and for the warp's wait for the empty stage, which arrivals of copies do not cover.
JETRL_DEVICE void arrive_behind_copies(uint32_t full) {
  sm90::cp_async_arrive(full);
  if (arrives()) sm90::barrier_arrive(full);
}

// One warp copies a block's values. A lane knows the place of one unit, in steps that the cache defines, so that the
// product with a page's stride is computed once.
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
  int pages = 0;  // loaded before the wait for the other blocks of the cluster
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
  if constexpr (kBlocks > 1) sm90::sync_cluster();  // sends read this block's memory until they have arrived
}

// Warps of O take turns if all clusters have multiprocessors of their own and turns are faster.
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

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode attention over an FP8 KV cache by clusters of 2, 4 or 8 blocks (decode_attention_cluster.cuh); one block's
// kernel is sm90_decode_attention.cu. Copies are bulk copies, a unit of 16 tokens a lane.

#include "decode_attention_cluster.cuh"

namespace jetrl {
namespace {

template <int kOfACluster>
struct Fp8Cache {
  using Params = Fp8Params;
  using Queries = jetrl::Queries;
  using Barriers = ClusterBarriers<Fp8Cache>;
  using Shape = ClusterShape<Fp8Cache>;

  static constexpr int kBlocks = kOfACluster, kPieces = 1;
  static constexpr bool kHasScales = true;
  static constexpr int kOutputWarps = 8 / kBlocks, kChunks = 1;
  static constexpr int kKeyWarps = 1, kValueWarps = 1, kKeyArrivals = 1, kValueArrivals = 1;
  // Of a unit: what comes with its keys, and a block's values.
  static constexpr int kKeyUnit = CacheUnit::kValues, kValueUnit = CacheUnit::kMatrix / kBlocks;
  static constexpr int kKeyStages = kBlocks < 8 ? 3 : 2, kKeyStage = kUnitsOfABlock * kKeyUnit;
  static constexpr int kValueStages = kBlocks < 4 ? 4 : 8, kValueStage = kUnitsOfABlock * kValueUnit;
  static constexpr int kPlaces = kBlocks < 4 ? 4 : kBlocks;

  JETRL_DEVICE static int part_of(int unit) { return unit / 2; }
  JETRL_DEVICE static int unit_of_part(int unit) { return unit % 2; }

  JETRL_DEVICE static void multiply(float (&d)[2][4], const uint8_t* const (&keys)[1], const Queries& q, int warp) {
    compute_two_units<kKeyUnit>(d, keys[0] + 2 * warp * kKeyUnit, q);
  }

  // Of values, of keys 4 four .. of a unit.
  JETRL_DEVICE static uint32_t four_scales(const uint8_t* keys, int unit, int four) {
    return word_at(keys + unit * kKeyUnit + CacheUnit::kValueScales + 4 * four);
  }

  JETRL_DEVICE static void add(float (&d)[1][4], const uint8_t* values, const uint8_t* p, int, int warp, int chunk) {
    if (word_at(p + Shape::kLarge) != 0) {
      add_chunk<true>(d[0], values + warp * CacheUnit::kChunk, p, chunk % 2 != 0);
    } else {
      add_chunk<false>(d[0], values + warp * CacheUnit::kChunk, p, chunk % 2 != 0);
    }
  }

  // D += V^T P^T of a block of keys and a chunk of 16 features, of which 2g + b is row g + 8b.
  template <bool kLarge>
  JETRL_DEVICE static void add_chunk(float (&d)[4], const uint8_t* values, const uint8_t* p, bool is_odd) {
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
          const int at = unit * kValueUnit + 8 * k * 16;
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

  JETRL_DEVICE static void store(uint16_t* chunk, uint32_t two) {
    *reinterpret_cast<uint32_t*>(chunk + 2 * (sm90::own_lane() / 4)) = two;
  }

  JETRL_DEVICE static const uint8_t* at(const Params& p, const Units& units, int page, int i, int unit) {
    const int64_t of_head = int64_t(page) * p.kv_heads + units.head;
    return p.cache + (of_head * units.of_a_page + units.on_page(i, unit)) * CacheUnit::kBytes;
  }

  JETRL_DEVICE static void copy_keys(const Params& p, uint32_t to, const Barriers& barriers, const Units& units,
                                     int page, int rank, int) {
    const int lane = sm90::own_lane();
    Place<kKeyStages> keys;
#pragma unroll 1
    for (int i = rank; i < units.blocks; i += kBlocks) {
      const int next = lane < kUnitsOfABlock ? units.page(i + kBlocks, lane) : 0, held = units.held(i);
      const uint32_t full = barriers.keys_full(keys.stage);
      const bool is_reused = i >= kBlocks * kKeyStages;
      if (is_reused) {
        sm90::barrier_wait(barriers.keys_empty(keys.stage), keys.parity ^ 1, "keys_empty", keys.stage);
      }
      sm90::sync_warp();
      if (sm90::elect_one()) sm90::barrier_arrive_expect(full, held * kKeyUnit);
      sm90::sync_warp();
      if (lane < held) {
        const uint32_t unit = to + keys.stage * kKeyStage + lane * kKeyUnit;
        sm90::bulk_load(unit, at(p, units, page, i, lane), kKeyUnit, full);
      }
      page = next;
      keys.advance();
    }
  }

  JETRL_DEVICE static void copy_values(const Params& p, uint32_t to, const Barriers& barriers, const Units& units,
                                       int next, int rank) {
    const int lane = sm90::own_lane(), unit = lane % kUnitsOfABlock, turn = lane / kUnitsOfABlock;
    int page = 0;
    Place<kValueStages> values;
#pragma unroll 1
    for (int i = 0; i < units.blocks; ++i) {
      if (i % kBlocksAhead == 0) page = next, next = units.page(i + kBlocksAhead + turn, unit);
      const int held = units.held(i);
      const uint32_t full = barriers.values_full(values.stage);
      if (i >= kValueStages) {
        sm90::barrier_wait(barriers.values_empty(values.stage), values.parity ^ 1, "values_empty", values.stage);
      }
      sm90::sync_warp();
      if (sm90::elect_one()) sm90::barrier_arrive_expect(full, held * kValueUnit);
      sm90::sync_warp();
      if (turn == i % kBlocksAhead && unit < held) {
        const uint8_t* from = at(p, units, page, i, unit) + CacheUnit::kValues + rank * kValueUnit;
        sm90::bulk_load(to + values.stage * kValueStage + unit * kValueUnit, from, kValueUnit, full);
      }
      values.advance();
    }
  }
};

}  // namespace

void decode_attention_in_clusters(const Fp8Params& params, int pairs, int cluster, Stream stream) {
  if (cluster == 2) {
    start_cluster<Fp8Cache<2>>(params, pairs, stream);
  } else if (cluster == 4) {
    start_cluster<Fp8Cache<4>>(params, pairs, stream);
  } else if (cluster == 8) {
    start_cluster<Fp8Cache<8>>(params, pairs, stream);
  } else {
    refuse_cluster(cluster);
  }
}

}  // namespace jetrl

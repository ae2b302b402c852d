// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode attention over an FP8 KV cache by clusters of 2, 4 or 8 blocks (decode_attention_cluster.cuh); the kernel of a
// single block is sm90_decode_attention.cu. A unit of 16 keys is one bulk copy, with all scales; values, smaller parts
// in every block, are copied 16 bytes a lane.

#include "decode_attention_cluster.cuh"

namespace jetrl {
namespace {

template <int kOfACluster, int kTurnsOfOutput>
struct Fp8Cache {
  using Params = Fp8Params;
  using Queries = jetrl::Queries;
  using Barriers = ClusterBarriers<Fp8Cache>;
  using Shape = ClusterShape<Fp8Cache>;

  static constexpr int kBlocks = kOfACluster, kTurns = kTurnsOfOutput, kPieces = 1;
  static constexpr bool kGainsByTurns = true;
  static constexpr bool kHasScales = true;
  static constexpr int kOutputWarps = 8 / kBlocks, kChunks = 1;
  static constexpr int kSoftmaxWarps = 4, kKeyWarps = 1, kKeyArrivals = 1;
  // Bytes of a unit: keys with all scales, and a block's values.
  static constexpr int kKeyUnit = CacheUnit::kValues, kValueUnit = CacheUnit::kMatrix / kBlocks;
  static constexpr int kKeyStages = (kBlocks < 8 ? 3 : 2) + (kTurns > 1), kKeyStage = kUnitsOfABlock * kKeyUnit;
  static constexpr int kValueStages = (kBlocks < 4 ? 4 : 8) * kTurns, kValueStage = kUnitsOfABlock * kValueUnit;
  static constexpr int kPlaces = kBlocks < 8 ? 4 * kTurns : 8;

  JETRL_DEVICE static int part_of(int unit) { return unit / 2; }
  JETRL_DEVICE static int unit_of_part(int unit) { return unit % 2; }

  JETRL_DEVICE static void multiply(float (&d)[2][4], const uint8_t* const (&keys)[1], const Queries& q, int warp) {
    compute_two_units<kKeyUnit>(d, keys[0] + 2 * warp * kKeyUnit, q);
  }

  // Scales of values for keys 4 four .. of a unit.
  JETRL_DEVICE static uint32_t four_scales(const uint8_t* keys, int unit, int four) {
    return word_at(keys + unit * kKeyUnit + CacheUnit::kValueScales + 4 * four);
  }

  // The address that a lane gives to ldmatrix: a row of 16 bytes, of 32 keys, in a chunk of 16 features.
  JETRL_DEVICE static uint32_t place_of_lane(const uint8_t* memory, int warp, int chunk) {
    const int lane = sm90::own_lane(), row = lane % CacheUnit::kKeys ^ chunk % 2;
    const uint32_t values = sm90::shared_address(memory + Shape::kValuesAt) + warp * CacheUnit::kChunk;
    return values + lane / CacheUnit::kKeys * kValueUnit + row * 16;
  }

  // Two words of ldmatrix, transposed, as an operand V^T of 16 keys: the halves of word k have keys 8k + 2t and
  // 8k + 2t + 1, features 2g and 2g + 1, which are rows g and g + 8.
  JETRL_DEVICE static void dequantize_unit(uint32_t (&a)[4], uint32_t w0, uint32_t w1, uint32_t f0, uint32_t f1) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      a[b] = sm90::multiply_pair(shifted_halves(w0, b), f0);
      a[2 + b] = sm90::multiply_pair(shifted_halves(w1, b), f1);
    }
  }

  // The same for half of two units, times their factors or, where a scale of the block is large, its scales.
  template <bool kLarge>
  JETRL_DEVICE static void dequantize(uint32_t (&a)[4], const uint32_t (&words)[4], const uint4& f,
                                      const uint8_t* scales_of_keys, int two, int half) {
    const int t = sm90::own_lane() % 4;
    const uint32_t w0 = words[2 * half], w1 = words[2 * half + 1];
    if constexpr (!kLarge) {
      dequantize_unit(a, w0, w1, half == 0 ? f.x : f.z, half == 0 ? f.y : f.w);
    } else {
      uint32_t scales[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int key = (2 * two + half) * CacheUnit::kKeys + 2 * t + 8 * k;
        const uint32_t both = *reinterpret_cast<const uint16_t*>(scales_of_keys + key);
        scales[k] = sm90::permute_bytes(both, 0, 0x4140);
      }
      dequantize_unit(a, w0, w1, first_factors(scales[0]), first_factors(scales[1]));
      const uint32_t more[2] = {second_factors(scales[0]), second_factors(scales[1])};
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = sm90::multiply_pair(a[j], more[j / 2]);
    }
  }

  // D += V^T P^T of a block of keys. Eight products are a chain; meanwhile a warp dequantizes the next values.
  template <bool kLarge>
  JETRL_DEVICE static void add(float (&d)[4], const uint32_t (&words)[4][4], const uint4 (&p)[4],
                               const uint4 (&factors)[4], const uint8_t* scales_of_keys) {
#pragma unroll
    for (int two = 0; two < kUnitsOfABlock / 2; ++two) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        dequantize<kLarge>(a, words[two], factors[two], scales_of_keys, two, half);
        const uint32_t b[2] = {half == 0 ? p[two].x : p[two].z, half == 0 ? p[two].y : p[two].w};
        sm90::mma_bf16(d, a, b);
      }
    }
  }

  // Waits for the factors and values of the i-th block; returns the factors.
  JETRL_DEVICE static const uint8_t* wait_for_values(const uint8_t* memory, const Barriers& barriers,
                                                     const Place<kValueStages>& values, int i) {
    const int place = i % Shape::kFactorPlaces;
    sm90::barrier_wait(barriers.values_full(values.stage), values.parity, "values_full", values.stage);
    sm90::barrier_wait(barriers.factors_full(place), i / Shape::kFactorPlaces & 1, "factors_full", place);
    return memory + Shape::kFactorsAt + place * Shape::kFactors;
  }

  // Values of two units at a time and factors of a block of keys, after a wait for them.
  JETRL_DEVICE static const uint8_t* load_bytes(uint32_t (&words)[4][4], uint4 (&factors)[4], const uint8_t* memory,
                                                const Barriers& barriers, const Place<kValueStages>& values, int i,
                                                uint32_t of_lane) {
    const uint8_t* of_values = wait_for_values(memory, barriers, values, i);
    const uint4* rows = reinterpret_cast<const uint4*>(of_values + sm90::own_lane() % 4 * Shape::kFactorRow * 4);
#pragma unroll
    for (int two = 0; two < 4; ++two) {
      factors[two] = rows[two];
      sm90::ldmatrix_x4_transposed(words[two], of_lane + values.stage * kValueStage + 2 * two * kValueUnit);
    }
    return of_values;
  }

  JETRL_DEVICE static void load_values(uint32_t (&a)[kUnitsOfABlock][4], const uint8_t* memory,
                                       const Barriers& barriers, Place<kValueStages>& values, int i,
                                       uint32_t of_lane) {
    uint32_t words[4][4];
    uint4 factors[4];
    const uint8_t* of_values = load_bytes(words, factors, memory, barriers, values, i, of_lane);
    const bool large = word_at(of_values + Shape::kLarge) != 0;
    sm90::sync_warp();
    if (arrives()) sm90::barrier_arrive(barriers.values_empty(values.stage));
    values.advance();
    if (large) {
#pragma unroll
      for (int unit = 0; unit < kUnitsOfABlock; ++unit) {
        dequantize<true>(a[unit], words[unit / 2], factors[unit / 2], of_values, unit / 2, unit % 2);
      }
    } else {
#pragma unroll
      for (int unit = 0; unit < kUnitsOfABlock; ++unit) {
        dequantize<false>(a[unit], words[unit / 2], factors[unit / 2], of_values, unit / 2, unit % 2);
      }
    }
  }

  JETRL_DEVICE static void accumulate(float (&d)[1][4], const uint8_t* memory, const Barriers& barriers, int blocks,
                                      int warp, int chunk) {
    const uint32_t of_lane = place_of_lane(memory, warp, chunk);
    Place<kValueStages> values;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      uint32_t words[4][4];
      uint4 factors[4], p[4];
      const uint8_t* of_values = load_bytes(words, factors, memory, barriers, values, i, of_lane);
      const bool large = word_at(of_values + Shape::kLarge) != 0;
      const uint8_t* of_p = wait_for_probabilities<Fp8Cache>(memory, barriers, i);
      const float2 rescale = rescaling_of<Shape>(of_p);
#pragma unroll
      for (int two = 0; two < 4; ++two) p[two] = reinterpret_cast<const uint4*>(of_p)[32 * two + sm90::own_lane()];
      if (i > 0) rescale_output<Fp8Cache>(d, rescale);
      if (large) {
        add<true>(d[0], words, p, factors, of_values);
      } else {
        add<false>(d[0], words, p, factors, of_values);
      }
      sm90::sync_warp();
      if (arrives()) {
        sm90::barrier_arrive(barriers.values_empty(values.stage));
        sm90::barrier_arrive(barriers.p_empty(i % Shape::kSoftmaxWarps));
      }
      values.advance();
    }
  }

  JETRL_DEVICE static void store(uint16_t* chunk, uint32_t two) {
    *reinterpret_cast<uint32_t*>(chunk + 2 * (sm90::own_lane() / 4)) = two;
  }

  // In the i-th block: the unit's number among all units of the cache.
  JETRL_DEVICE static int place_of_unit(const Params& p, const Units& units, int page, int i, int unit) {
    return (page * p.kv_heads + units.head) * units.of_a_page + units.on_page(i, unit);
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
        const uint8_t* from = p.cache + int64_t(place_of_unit(p, units, page, i, lane)) * CacheUnit::kBytes;
        sm90::bulk_load(unit, from, kKeyUnit, full);
      }
      page = next;
      keys.advance();
    }
  }

  // A unit's part is contiguous in both memories. Units after the last, whose page is not defined, are not read and
  // become zeros.
  JETRL_DEVICE static void copy_values(const Params& p, uint32_t to, const Units&, int of_units, int known, int left,
                                       int, int rank) {
    constexpr int kSixteens = kValueUnit / 16, kUnitsAtOnce = kSixteens < 32 ? 32 / kSixteens : 1;
    const int lane = sm90::own_lane();
    const uint8_t* of_lane = p.cache + CacheUnit::kValues + rank * kValueUnit + lane % kSixteens * 16;
#pragma unroll
    for (int first = 0; first < kUnitsOfABlock; first += kUnitsAtOnce) {
      const int unit = first + lane / kSixteens;
      const uint8_t* from = of_lane + int64_t(sm90::shuffle(of_units, known + unit)) * CacheUnit::kBytes;
      const bool exists = unit * CacheUnit::kKeys < left;
#pragma unroll
      for (int sixteen = 0; sixteen < kSixteens; sixteen += 32) {
        sm90::cp_async_16(to + first * kValueUnit + (sixteen + lane) * 16, from + sixteen * 16, exists);
      }
    }
  }
};

}  // namespace

void decode_attention_in_clusters(const Fp8Params& params, int pairs, int cluster, Stream stream) {
  if (cluster == 2) {
    start_cluster<Fp8Cache, 2>(params, pairs, stream);
  } else if (cluster == 4) {
    start_cluster<Fp8Cache, 4>(params, pairs, stream);
  } else if (cluster == 8) {
    start_cluster<Fp8Cache, 8>(params, pairs, stream);
  } else {
    refuse_cluster(cluster);
  }
}

}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode attention over vLLM's BF16 pages, with the bits of FlashAttention 3 (num_splits=1), by clusters of 1, 2, 4 or
// 8 blocks (decode_attention_cluster.cuh).
//
// Keys and values are operands without conversion. A stage has 64 keys; the stages fill half of a multiprocessor's
// shared memory, or all of it where a block has it alone. A row of a token and head, 256 bytes or a block's part of it,
// is copied 16 bytes a lane, with any strides of pages; rows after the last token are not read and become zeros. Rows
// of eight keys lie in different banks (place_of), for ldmatrix.

#include "decode_attention_cluster.cuh"

namespace jetrl {
namespace {

struct Bf16Params : DecodeAttentionParams {
  Bf16Pages pages;
};

// A lane's part of Q as an operand: query g, features 2t and 2t + 1 of eight.
struct PlainQueries {
  uint32_t first[8], second[8];

  JETRL_DEVICE void load(const uint16_t* q, int group) {
    const int lane = sm90::own_lane(), g = lane / 4, t = lane % 4;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(q + g * 128) + t;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      first[k] = g < group ? words[8 * k] : 0;
      second[k] = g < group ? words[8 * k + 4] : 0;
    }
  }
};

template <int kOfACluster, int kTurnsOfOutput>
struct Bf16Cache {
  using Params = Bf16Params;
  using Queries = PlainQueries;
  using Barriers = ClusterBarriers<Bf16Cache>;
  using Shape = ClusterShape<Bf16Cache>;

  static constexpr int kBlocks = kOfACluster, kTurns = kTurnsOfOutput, kPieces = 2;
  static constexpr bool kGainsByTurns = kBlocks < 8;  // 8 pairs of 32k keys: C = 2, 4 gain 5%, C = 8 loses 3%
  static constexpr bool kHasScales = false;
  static constexpr int kOutputWarps = kBlocks == 1 ? 4 : 8 / kBlocks, kChunks = kBlocks == 1 ? 2 : 1;
  static constexpr int kSoftmaxWarps = kBlocks < 4 ? 2 : 4;
  static constexpr int kKeyWarps = 2, kKeyArrivals = kArrivalsOfLanes * kKeyWarps;
  static constexpr int kRows = kKeysOfABlock / kPieces, kUnitsOfAPiece = kUnitsOfABlock / kPieces;
  static constexpr int kKeySixteens = 16, kValueSixteens = 16 / kBlocks;  // of bytes, in a row
  static constexpr int kKeyStages = kTurns > 1 ? 6 : kBlocks < 8 ? 3 : 2, kKeyStage = kRows * kKeySixteens * 16;
  static constexpr int kValueStages = kTurns > 1    ? (kBlocks == 2 ? 8 : 16)
                                      : kBlocks < 4 ? (kBlocks == 1 ? 3 : 5)
                                                    : (kBlocks == 4 ? 8 : 15);
  static constexpr int kValueStage = kRows * kValueSixteens * 16;
  static constexpr int kPlaces = kBlocks == 1 ? 2 : kBlocks < 4 ? 4 : kBlocks;

  // Where 16 bytes of a row lie in a stage: eight rows lie in different banks.
  template <int kSixteens>
  JETRL_DEVICE static uint32_t place_of(int row, int sixteen) {
    constexpr int kRowsOfALine = kSixteens < 8 ? 8 / kSixteens : 1, kMask = (kSixteens < 8 ? kSixteens : 8) - 1;
    return uint32_t(row * kSixteens + (sixteen ^ (row / kRowsOfALine & kMask))) * 16;
  }

  // Warp w has unit w of each piece.
  JETRL_DEVICE static int part_of(int unit) { return unit % kUnitsOfAPiece; }
  JETRL_DEVICE static int unit_of_part(int unit) { return unit / kUnitsOfAPiece; }
  JETRL_DEVICE static void multiply(float (&d)[2][4], const uint8_t* const (&pieces)[2], const Queries& q, int warp) {
    const int lane = sm90::own_lane(), row = 16 * warp + lane % 16;
    const uint32_t at[2] = {sm90::shared_address(pieces[0]), sm90::shared_address(pieces[1])};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t place = place_of<kKeySixteens>(row, 2 * k + lane / 16), b[2] = {q.first[k], q.second[k]};
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        uint32_t a[4];
        sm90::ldmatrix_x4(a, at[unit] + place);
        sm90::mma_bf16(d[unit], a, b);
      }
    }
  }

  JETRL_DEVICE static void add(float (&d)[kChunks][4], const uint8_t* values, const uint8_t* p, int piece,
                               int warp) {
    const int lane = sm90::own_lane(), key = lane % 8 + lane / 16 * 8, sixteen = 2 * kChunks * warp + lane / 8 % 2;
    const uint4* probabilities = reinterpret_cast<const uint4*>(p) + 32 * kUnitsOfAPiece / 2 * piece + lane;
    const uint32_t at = sm90::shared_address(values);
#pragma unroll
    for (int two = 0; two < kUnitsOfAPiece / 2; ++two) {
      const uint4 of_p = probabilities[32 * two];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t b[2] = {half == 0 ? of_p.x : of_p.z, half == 0 ? of_p.y : of_p.w};
        const int row = 16 * (2 * two + half) + key;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          uint32_t a[4];
          sm90::ldmatrix_x4_transposed(a, at + place_of<kValueSixteens>(row, sixteen + 2 * c));
          sm90::mma_bf16(d[c], a, b);
        }
      }
    }
  }

  JETRL_DEVICE static uint32_t place_of_lane(const uint8_t* memory, int warp, int) {
    const int lane = sm90::own_lane(), key = lane % 8 + lane / 16 * 8, sixteen = 2 * warp + lane / 8 % 2;
    return sm90::shared_address(memory + Shape::kValuesAt) + place_of<kValueSixteens>(key, sixteen);
  }

  JETRL_DEVICE static void load_values(uint32_t (&a)[kUnitsOfABlock][4], const uint8_t*, const Barriers& barriers,
                                       Place<kValueStages>& values, int, uint32_t of_lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      sm90::barrier_wait(barriers.values_full(values.stage), values.parity, "values_full", values.stage);
#pragma unroll
      for (int unit = 0; unit < kUnitsOfAPiece; ++unit) {
        const uint32_t at = of_lane + values.stage * kValueStage + unit * CacheUnit::kKeys * kValueSixteens * 16;
        sm90::ldmatrix_x4_transposed(a[kUnitsOfAPiece * piece + unit], at);
      }
      sm90::sync_warp();
      if (arrives()) sm90::barrier_arrive(barriers.values_empty(values.stage));
      values.advance();
    }
  }

  JETRL_DEVICE static void accumulate(float (&d)[kChunks][4], const uint8_t* memory, const Barriers& barriers,
                                      int blocks, int warp, int) {
    Place<kValueStages> values;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const uint8_t* of_p = nullptr;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        sm90::barrier_wait(barriers.values_full(values.stage), values.parity, "values_full", values.stage);
        if (piece == 0) {
          of_p = wait_for_probabilities<Bf16Cache>(memory, barriers, i);
          if (i > 0) rescale_output<Bf16Cache>(d, rescaling_of<Shape>(of_p));
        }
        add(d, memory + Shape::kValuesAt + values.stage * kValueStage, of_p, piece, warp);
        sm90::sync_warp();
        if (arrives()) sm90::barrier_arrive(barriers.values_empty(values.stage));
        values.advance();
      }
      if (arrives()) sm90::barrier_arrive(barriers.p_empty(i % Shape::kSoftmaxWarps));
    }
  }

  JETRL_DEVICE static void store(uint16_t* chunk, uint32_t two) {
    const int g = sm90::own_lane() / 4;
    chunk[g] = uint16_t(two), chunk[g + 8] = uint16_t(two >> 16);
  }

  // Of the i-th block: offset from the first page in steps of 16 bytes.
  JETRL_DEVICE static int place_of_unit(const Params& p, const Units& units, int page, int i, int unit) {
    return page * p.pages.stride_page + units.on_page(i, unit) * CacheUnit::kKeys * p.pages.stride_token;
  }

  // Copies units of a piece to the stage at `to`: `head` is the head's part on the first page, `of_units` are the
  // places of the block's units, from lane `known` on; `left` keys of the block exist.
  template <int kSixteens, int kCount>
  JETRL_DEVICE static void copy_units(uint32_t to, const uint8_t* head, int64_t row_bytes, int of_units, int known,
                                      int left, int piece, int first) {
    constexpr int kRowsAtOnce = 32 / kSixteens;
    const int lane = sm90::own_lane(), row = lane / kSixteens, sixteen = lane % kSixteens;
    const uint8_t* of_lane = head + row * row_bytes + 16 * sixteen;
#pragma unroll
    for (int u = first; u < first + kCount; ++u) {
      const uint8_t* from = of_lane + int64_t(sm90::shuffle(of_units, known + kUnitsOfAPiece * piece + u)) * 16;
#pragma unroll
      for (int r = 0; r < CacheUnit::kKeys; r += kRowsAtOnce) {
        const int key = CacheUnit::kKeys * u + r + row;
        const bool exists = kRows * piece + key < left;
        sm90::cp_async_16(to + place_of<kSixteens>(key, sixteen), from, exists);
        from += kRowsAtOnce * row_bytes;
      }
    }
  }

  JETRL_DEVICE static void copy_keys(const Params& p, uint32_t to, const Barriers& barriers, const Units& units,
                                     int page, int rank, int warp) {
    constexpr int kCount = kUnitsOfAPiece / kKeyWarps;
    const int unit = sm90::own_lane() % kUnitsOfABlock;
    const int64_t row_bytes = int64_t(p.pages.stride_token) * 16;
    const uint8_t* head = p.pages.keys + int64_t(units.head) * p.pages.stride_head * 16;
    Place<kKeyStages> keys;
#pragma unroll 1
    for (int i = rank; i < units.blocks; i += kBlocks) {
      const int of_units = place_of_unit(p, units, page, i, unit), left = units.keys(i);
      page = units.page(i + kBlocks, unit);
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        sm90::barrier_wait(barriers.keys_empty(keys.stage), keys.parity ^ 1, "keys_empty", keys.stage);
        copy_units<kKeySixteens, kCount>(to + keys.stage * kKeyStage, head, row_bytes, of_units, 0, left, piece,
                                         kCount * warp);
        arrive_behind_copies(barriers.keys_full(keys.stage));
        keys.advance();
      }
    }
  }

  JETRL_DEVICE static void copy_values(const Params& p, uint32_t to, const Units& units, int of_units, int known,
                                       int left, int piece, int rank) {
    const int64_t row_bytes = int64_t(p.pages.stride_token) * 16;
    const uint8_t* head =
        p.pages.values + (int64_t(units.head) * p.pages.stride_head + rank * kValueSixteens) * 16;
    copy_units<kValueSixteens, kUnitsOfAPiece>(to, head, row_bytes, of_units, known, left, piece, 0);
  }
};

}  // namespace

void decode_attention_bf16(const DecodeAttention& call, const Bf16Pages& pages, Stream stream) {
  const Bf16Params params{params_of(call), pages};
  const int pairs = call.requests * call.kv_heads;
  if (call.cluster == 1) {
    start_cluster<Bf16Cache, 1>(params, pairs, stream);
  } else if (call.cluster == 2) {
    start_cluster<Bf16Cache, 2>(params, pairs, stream);
  } else if (call.cluster == 4) {
    start_cluster<Bf16Cache, 4>(params, pairs, stream);
  } else if (call.cluster == 8) {
    start_cluster<Bf16Cache, 8>(params, pairs, stream);
  } else {
    refuse_cluster(call.cluster);
  }
}

}  // namespace jetrl

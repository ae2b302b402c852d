// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Shared by the kernels for few rows of X (sm90_decode_fprop.cu, sm90_grouped_decode.cu): the layout of a stage and the
// chains of a consumer warpgroup.
//
// wgmma's M is 64 tokens, its N a narrow tile of kColumns rows of W. A stage holds one or two K blocks: one wait for
// its copies, one for its chains, one release. The chains of stage i + 1 are issued before the wait for those of stage
// i.
//
// Edges: TMA and cp.async fill with zeros. With an odd number of K blocks half a stage is past K: its partial sums are
// +0 and its scale is set to -0, since fma(+0, -0, acc) = acc in every bit; a scale of +0 would turn -0 into +0.

#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"

namespace jetrl {

namespace {

constexpr int kSpare = 1024;  // bytes of shared memory that the system needs per block

// TMA loads kTokens rows of X; wgmma reads 64. Rows past kTokens are whatever follows the tile in shared memory; rows
// of D are independent, and these are not stored. Tiles start on multiples of 16 columns, so 16 columns share a scale
// of W; 48 does not divide 128, so there each 16 columns read one of the stage's two scales.
template <int kTokens_, int kColumns_, int kBlocks_ = kTokens_ <= 64 ? 2 : 1>
struct DecodeShape {
  static constexpr int kTokens = kTokens_, kColumns = kColumns_, kConsumers = ceil_div(kTokens, 64);
  static constexpr int kBlocks = kBlocks_;  // of K, per stage
  static constexpr int kCopyWarp = 4 * kConsumers, kScaleWarp = kCopyWarp + 1;
  static constexpr int kThreads = 128 * kConsumers + 64;
  static constexpr int kTileX = kTokens * kGroup, kTileW = kColumns * kGroup;
  static constexpr int kStageX = kBlocks * kTileX, kStageW = kBlocks * kTileW;
  // Scales of a stage: one per token, then one for each of the two blocks of W that a tile may reach, per K block.
  static constexpr int kAtWScales = kBlocks * kTokens, kStageScales = 4 * round_up(kAtWScales + 2 * kBlocks, 4);
  static constexpr int kFit = (kSharedMemory - kSpare) / (kStageX + kStageW + kStageScales + 16);
  static constexpr int kStages = kFit < 32 ? kFit : 32;
  static constexpr int kEarly = ceil_div(32768, kStageW) < kStages ? ceil_div(32768, kStageW) : kStages;
  // Columns share a scale of W in sixteens, or all of them where no tile straddles two.
  static constexpr int kScaleGroups = kGroup % kColumns == 0 ? 1 : kColumns / 16;
  // Byte offsets in shared memory.
  static constexpr int kAtW = kStages * kStageX;
  static constexpr int kAtScales = kAtW + kStages * kStageW;
  static constexpr int kAtFull = kAtScales + kStages * kStageScales;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kBytes = kAtEmpty + 8 * kStages;

  static_assert(kTokens * kBlocks % 32 == 0, "a warp copies whole rounds of token scales");
  static_assert(kColumns % 16 == 0, "16 columns share a scale of W");
  static_assert(kStages >= 3, "two stages are in the consumers' hands");
  static_assert(kStages * kStageW >= 64 * kGroup, "wgmma reads 64 rows from the last tile of X on");
  static_assert(kBytes <= kSharedMemory - kSpare, "the stages do not fit into shared memory");
};

// Starts and promotes the chains of a stage in a consumer warpgroup.
template <class Shape>
struct DecodePart {
  static constexpr int kBlocks = Shape::kBlocks, kColumns = Shape::kColumns, kSums = kColumns / 2;
  static constexpr int kScaleGroups = Shape::kScaleGroups, kFloats = Shape::kStageScales / 4;

  struct Factors {
    float upper[kBlocks][kScaleGroups], lower[kBlocks][kScaleGroups];  // s_x * s_w of this thread's two rows
  };

  StageRing next, oldest;  // to be started, to be promoted
  uint32_t x, w;           // low words of the descriptors of this warpgroup's tokens and columns in stage 0
  uint32_t high;           // and the high word of them all
  const float* x_scales;   // of this thread's upper row in stage 0
  int lower;               // floats from there to the lower row
  const float* w_scales[kScaleGroups];
  int lane;

  JETRL_DEVICE uint64_t descriptor(uint32_t low) const { return uint64_t(high) << 32 | low; }

  // The chains of a stage, each from zero, as one group.
  JETRL_DEVICE void start(float (&sums)[kBlocks][kSums]) {
    const uint32_t at_x = x + next.stage * (Shape::kStageX / 16), at_w = w + next.stage * (Shape::kStageW / 16);
    next.wait_full();
    sm90::wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < kChainLength; ++k) {
        sm90::wgmma<kColumns>(sums[b], descriptor(at_x + b * (Shape::kTileX / 16) + k * kDescriptorStepK32),
                              descriptor(at_w + b * (Shape::kTileW / 16) + k * kDescriptorStepK32), k != 0);
      }
    }
    sm90::wgmma_commit();
    next.advance();
  }

  // The scales of a stage's K blocks for one token or block of W.
  JETRL_DEVICE static void load(float (&values)[kBlocks], const float* from) {
    if constexpr (kBlocks == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      values[0] = pair.x, values[1] = pair.y;
    } else {
      values[0] = *from;
    }
  }

  // Factors of the oldest stage, of which `left` K blocks exist.
  JETRL_DEVICE void read(Factors& factors, int left) const {
    const int stage = oldest.stage * kFloats;
    float of_upper[kBlocks], of_lower[kBlocks];
    load(of_upper, x_scales + stage);
    load(of_lower, x_scales + stage + lower);
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      float of_w[kBlocks];
      load(of_w, w_scales[g] + stage);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (b == 1 && left == 1) of_w[b] = -0.0f;  // the half past K
        factors.upper[b][g] = sm90::multiply(of_upper[b], of_w[b]);
        factors.lower[b][g] = sm90::multiply(of_lower[b], of_w[b]);
      }
    }
  }

  // Promotes the oldest stage while the chains of kYounger younger ones run.
  template <int kYounger>
  JETRL_DEVICE void finish(float (&acc)[kSums], float (&sums)[kBlocks][kSums], const Factors& factors) {
    sm90::wgmma_wait<kYounger>(sums);
    oldest.release<1>(lane);
    oldest.advance();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int g = kScaleGroups == 1 ? 0 : i / 8;
        acc[i] = sm90::multiply_add(sums[b][i], i % 4 < 2 ? factors.upper[b][g] : factors.lower[b][g], acc[i]);
      }
    }
  }

  // This thread has row `upper` of the tile.
  JETRL_DEVICE DecodePart(uint8_t* memory, StageRing ring, int consumer, int upper, int lane)
      : next(ring), oldest(ring), lane(lane) {
    const uint32_t base = sm90::shared_address(memory);
    const uint64_t x_descriptor = operand_descriptor(base), w_descriptor = operand_descriptor(base + Shape::kAtW);
    x = uint32_t(x_descriptor) + consumer * uint32_t(kDescriptorStep64Rows);
    w = uint32_t(w_descriptor);
    high = uint32_t(x_descriptor >> 32);
    // Rows past kTokens have no scale and are not stored: they read any.
    const float* scales = reinterpret_cast<const float*>(memory + Shape::kAtScales);
    x_scales = scales + kBlocks * (upper % Shape::kTokens);
    lower = kBlocks * ((upper + 8) % Shape::kTokens - upper % Shape::kTokens);
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) w_scales[g] = scales + Shape::kAtWScales;
  }

  // acc += the K blocks of a tile; calls begun() when the chains of the first stage run.
  template <class Begun>
  JETRL_DEVICE void multiply(float (&acc)[kSums], int k_blocks, const Begun& begun) {
    float even[kBlocks][kSums], odd[kBlocks][kSums];
    // Two stages in flight, each exit of the loop with its own waits: the compiler serializes chains that end in
    // another branch than they start in, or that nothing reads.
    Factors factors;
    int left = k_blocks;
    start(even);
    begun();
    for (; left > 2 * kBlocks; left -= 2 * kBlocks) {
      read(factors, kBlocks);
      start(odd);
      finish<1>(acc, even, factors);
      read(factors, kBlocks);
      start(even);
      finish<1>(acc, odd, factors);
    }
    if (left > kBlocks) {
      read(factors, kBlocks);
      start(odd);
      finish<1>(acc, even, factors);
      read(factors, left - kBlocks);
      finish<0>(acc, odd, factors);
    } else {
      read(factors, left);
      finish<0>(acc, even, factors);
    }
  }
};

// Stores only rows before `end` and columns before `columns`.
template <int kSums>
JETRL_DEVICE void store_fragments(const float (&acc)[kSums], const Output& y, int row, int end, int column,
                                  int columns) {
  // Four lanes hold 16 contiguous bytes of a row of Y. Rows of D past kTokens are past M, too.
  uint16_t* to_upper = static_cast<uint16_t*>(y.data) + row * y.row_stride + column;
  uint16_t* to_lower = to_upper + 8 * y.row_stride;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const bool stored = column + 8 * j < columns;
    const uint32_t of_upper = sm90::pack_bf16(acc[4 * j], acc[4 * j + 1]);
    const uint32_t of_lower = sm90::pack_bf16(acc[4 * j + 2], acc[4 * j + 3]);
    if (stored && row < end) *reinterpret_cast<uint32_t*>(to_upper + 8 * j) = of_upper;
    if (stored && row + 8 < end) *reinterpret_cast<uint32_t*>(to_lower + 8 * j) = of_lower;
  }
}

}  // namespace

}  // namespace jetrl

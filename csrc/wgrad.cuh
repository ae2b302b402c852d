// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Shared by the kernels of weight gradients (sm90_wgrad_1x128_1x128.cu, sm90_grouped_wgrad.cu): the layout of a tile in
// shared memory and the promotion of partial sums.

#pragma once

#include "epilogue.cuh"
#include "launch.h"
#include "pipeline.cuh"
#include "tile_ring.cuh"

namespace jetrl {

namespace {

// Column scales are read once per K block, while its first chain runs, and kept for all chains: 32 registers next to
// 192 for sums, so a consumer thread has 240 and a producer thread 24. The two warpgroups take turns at issuing chains
// only if the output is FP32. Turns are mbarriers: the compiler moves a BAR.SYNC up between the multiplications, but
// nothing past the loop of an mbarrier's wait.
template <int kBlockM_, int kCluster_, bool kFp32_>
struct WgradShape {
  static constexpr int kBlockM = kBlockM_, kBlockN = 128, kCluster = kCluster_;
  static constexpr bool kFp32 = kFp32_, kTurns = kFp32_;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kChunks = kBlockM / (64 * kConsumers);  // of 64 rows, per consumer warpgroup
  static constexpr int kStages = kBlockM == 256 ? 4 : 6;
  static constexpr int kTileA = kBlockM * kGroup, kTileB = kBlockN * kGroup;
  static constexpr int kScales = kBlockM + kBlockN;  // floats per stage: rows, then columns
  // Byte offsets in shared memory.
  static constexpr int kAtB = kStages * kTileA;
  static constexpr int kAtStaging = kAtB + kStages * kTileB;
  static constexpr int kAtScales = kAtStaging + 4 * kConsumers * kStagingBytes;
  static constexpr int kAtFull = kAtScales + kStages * kScales * 4;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kAtTurns = kAtEmpty + 8 * kStages;  // one mbarrier per consumer
  static constexpr int kBytes = kAtTurns + 8 * kConsumers;

  static_assert(kBlockM % (64 * kConsumers) == 0, "each consumer warpgroup owns whole chunks of 64 rows");
  static_assert(kTileA % 1024 == 0 && kTileB % 1024 == 0, "operand tiles start on whole swizzle atoms");
  static_assert(kAtScales % 128 == 0 && kBlockM * 4 % 128 == 0, "TMA writes scales to multiples of 128 bytes");
  static_assert(kAtFull % 8 == 0, "mbarriers are 8 bytes, aligned");
  static_assert(kBytes <= kSharedMemory, "the stages do not fit into shared memory");
};

// acc = fma(p, s_a * s_b, acc); in a tile's first K block fma(p, s_a * s_b, +0).
template <bool kFirst = false>
JETRL_DEVICE void promote(float (&acc)[64], const float (&partial)[64], const float2 (&columns)[16], float upper,
                          float lower) {
  const auto add_to = [](float old) { return kFirst ? 0.0f : old; };
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    const int j = 4 * g;
    acc[j] = sm90::multiply_add(partial[j], sm90::multiply(upper, columns[g].x), add_to(acc[j]));
    acc[j + 1] = sm90::multiply_add(partial[j + 1], sm90::multiply(upper, columns[g].y), add_to(acc[j + 1]));
    acc[j + 2] = sm90::multiply_add(partial[j + 2], sm90::multiply(lower, columns[g].x), add_to(acc[j + 2]));
    acc[j + 3] = sm90::multiply_add(partial[j + 3], sm90::multiply(lower, columns[g].y), add_to(acc[j + 3]));
  }
}

}  // namespace

}  // namespace jetrl

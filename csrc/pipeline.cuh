// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The ring of shared-memory stages between the warps that copy ("the producer") and the consumer warpgroups.
//
// Stage s has two mbarriers. `full`: per phase one arrival of the thread that announces the bytes of the copy engine,
// and one of each lane that copies scales by cp.async; the phase ends when all have arrived and all bytes are written.
// `empty`: one arrival per consumer warp of every block of the cluster, since a multicast overwrites the stage in all.
//
// Use number i of the ring is stage i % stages in round i / stages. Both barriers count rounds in their phase, so
//   consumers wait for   full[s]  with parity  round % 2        (the phase that this round's copies end)
//   the producer for     empty[s] with parity  round % 2 ^ 1    (the phase that last round's readers ended; in round 0
//                                                                the one before the first, which counts as over)

#pragma once

#include "sm90.cuh"

namespace jetrl {

// Whether all lanes of a warp arrive at the `empty` of every block, not one lane at each, after the warp's sync. For
// compute-sanitizer: racecheck follows lanes separately and does not see the sync of a warp that never diverged.
#ifdef JETRL_DEBUG
constexpr bool kAllLanesRelease = true;
#else
constexpr bool kAllLanesRelease = false;
#endif

template <int kCluster, int kConsumerWarps>
constexpr int kReleases = (kAllLanesRelease ? 32 : 1) * kCluster * kConsumerWarps;

// Called by every lane of a warp; lane r arrives at the barrier of block r, or all lanes at all.
template <int kCluster>
JETRL_DEVICE void arrive_at_blocks(uint32_t barrier, int lane) {
  if constexpr (kAllLanesRelease) {
    for (int rank = 0; rank < kCluster; ++rank) sm90::barrier_arrive_at(barrier, rank);
  } else {
    if (lane < kCluster) sm90::barrier_arrive_at(barrier, lane);
  }
}

// A wait names a phase by its parity, which suffices while no thread can be two phases behind. `full` cannot end phase
// r + 1 before the producer saw `empty` end phase r, which needs every warp to have passed its wait for `full` in round
// r; `empty` cannot end phase r + 1 before the consumers passed `full` of round r + 1, which follows the producer's
// wait for `empty` of phase r, in each block of the cluster. So a warp that copies waits for `empty` only of stages to
// whose `full` it arrives in every use; its lanes that do not arrive meet the others after each wait.
//
// In a cluster, block P may issue its half of a tile for round r before block Q's producer has announced its bytes.
// They count on Q's `full` in a phase that lacks Q's own arrival and so cannot end early; the count may be below zero
// until the announcement. It is the right phase: P saw `empty` end, so Q's warps had passed `full` of round r - 1.
struct StageRing {
  uint32_t full, empty;  // shared addresses of the two arrays of barriers
  int stages;
  int stage = 0;
  uint32_t round = 0;  // parity only

  JETRL_DEVICE uint32_t full_barrier() const { return full + 8 * stage; }
  JETRL_DEVICE uint32_t empty_barrier() const { return empty + 8 * stage; }

  JETRL_DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      round ^= 1;
    }
  }

  // By one thread of the block, before anybody waits.
  template <int kCluster, int kConsumerWarps>
  JETRL_DEVICE void init() const {
    for (int s = 0; s < stages; ++s) {
      sm90::barrier_init(full + 8 * s, 1 + 32);
      sm90::barrier_init(empty + 8 * s, kReleases<kCluster, kConsumerWarps>);
    }
    sm90::fence_barrier_init();
  }

  JETRL_DEVICE void wait_empty() const { sm90::barrier_wait(empty_barrier(), round ^ 1, "empty", stage); }

  JETRL_DEVICE void wait_full() const { sm90::barrier_wait(full_barrier(), round, "full", stage); }

  // By a whole consumer warp, whose lanes have all read what they wanted: one arrival in each block of the cluster.
  template <int kCluster>
  JETRL_DEVICE void release(int lane) const {
    sm90::sync_warp();
    if constexpr (kCluster == 1) {
      if (kAllLanesRelease || lane == 0) sm90::barrier_arrive(empty_barrier());
    } else {
      arrive_at_blocks<kCluster>(empty_barrier(), lane);
    }
  }
};

template <int kCluster>
JETRL_DEVICE void sync_cluster_or_block() {
  if constexpr (kCluster > 1) {
    sm90::sync_cluster();
  } else {
    sm90::sync_block();
  }
}

// A persistent grid: cluster c takes tiles c, c + clusters, ...
template <int kCluster>
JETRL_DEVICE int first_tile() {
  return sm90::block_index() / kCluster;
}
template <int kCluster>
JETRL_DEVICE int tile_step() {
  return sm90::grid_size() / kCluster;
}

// A tile of kRows rows that the kCluster blocks of a cluster share: each loads its part and sends it to all.
template <int kRows, int kCluster>
JETRL_DEVICE void load_shared_tile(uint32_t to, const sm90::TensorMap* map, int column, int row, int rank,
                                   uint32_t barrier) {
  if constexpr (kCluster == 1) {
    sm90::tma_load(to, map, column, row, barrier);
  } else {
    constexpr int kPart = kRows / kCluster;
    static_assert(kPart % 8 == 0, "a part is a whole number of swizzle atoms of eight rows");
    sm90::tma_load_multicast(to + rank * kPart * kGroup, map, column, row + rank * kPart, barrier,
                             uint16_t((1u << kCluster) - 1));
  }
}

// The scales of kRows rows from `row` on for one group, which the kCluster blocks of a cluster share in the same way.
template <int kRows, int kCluster>
JETRL_DEVICE void load_shared_scales(uint32_t to, const sm90::TensorMap* map, int row, int group, int rank,
                                     uint32_t barrier) {
  if constexpr (kCluster == 1) {
    sm90::tma_load(to, map, row, group, barrier);
  } else {
    constexpr int kPart = kRows / kCluster;
    static_assert(kPart * 4 % 128 == 0, "the copy engine writes to multiples of 128 bytes");
    sm90::tma_load_multicast(to + rank * kPart * 4, map, row + rank * kPart, group, barrier,
                             uint16_t((1u << kCluster) - 1));
  }
}

// The scales of `kCount` rows from `first` on for one group, by a whole warp; rows past `rows` get zero and are not
// read.
template <int kCount>
JETRL_DEVICE void load_scales(uint32_t to, const Scales& scales, int block, int first, int rows, int lane) {
  const float* from = scales.data + block * scales.stride_group + (first + lane) * scales.stride_row;
#pragma unroll
  for (int i = 0; i < ceil_div(kCount, 32); ++i) {
    const int r = 32 * i + lane;
    if (kCount % 32 == 0 || r < kCount) sm90::cp_async_f32(to + 4 * r, from, first + r < rows);
    from += 32 * scales.stride_row;
  }
}

// The chain of one K block for 64 rows: four k32 instructions that start from zero, committed as one group.
template <int N>
JETRL_DEVICE void issue_chain(float (&partial)[N / 2], uint64_t a, uint64_t b) {
  sm90::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kChainLength; ++k) {
    sm90::wgmma<N>(partial, a + k * kDescriptorStepK32, b + k * kDescriptorStepK32, k != 0);
  }
  sm90::wgmma_commit();
}

}  // namespace jetrl

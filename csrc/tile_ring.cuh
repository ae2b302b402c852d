// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The ring of pipeline.cuh with static stages: stage s has K blocks s, s + stages, ... of every tile. In an unrolled
// loop the compiler knows a stage's number, and its descriptors, barriers and scales are base + constant: nothing is
// computed between two chains.
//
// Every tile starts with stage 0, and its last round may not use all stages, so each stage counts its uses modulo two
// in a bit of its own. Producer and consumers use the stages in the same sequence, so their bits agree; a parity
// suffices as in pipeline.cuh, with "use of the stage" for "round". The price: at the end of a tile the producer runs
// ahead by fewer blocks, since it skips the stages that the last round skipped.

#pragma once

#include "pipeline.cuh"

namespace jetrl {

template <int kStages>
struct TileRing {
  uint32_t full, empty;  // shared addresses of the two arrays of barriers
  uint32_t parity = 0;   // bit s: how often stage s was used, modulo 2

  JETRL_DEVICE uint32_t full_barrier(int stage) const { return full + 8 * stage; }
  JETRL_DEVICE uint32_t empty_barrier(int stage) const { return empty + 8 * stage; }

  // By each thread that waits, between its waits for this use of the stage and for the next.
  JETRL_DEVICE void used(int stage) { parity ^= 1u << stage; }

  // By one thread of the block, before any wait. `full_arrivals`: of the copying thread and of the lanes that copy
  // scales by cp.async; stage 0 may have more, for copies once per round.
  template <int kCluster, int kConsumerWarps>
  JETRL_DEVICE void init(int full_arrivals, int more_at_first = 0) const {
    for (int s = 0; s < kStages; ++s) {
      sm90::barrier_init(full_barrier(s), full_arrivals + (s == 0 ? more_at_first : 0));
      sm90::barrier_init(empty_barrier(s), kReleases<kCluster, kConsumerWarps>);
    }
    sm90::fence_barrier_init();
  }

  // By a whole warp that copies a part of the stage.
  JETRL_DEVICE void wait_empty(int stage) const {
    sm90::barrier_wait(empty_barrier(stage), (parity >> stage & 1) ^ 1, "empty", stage);
    sm90::sync_warp();  // else a late lane may miss the phase: the lanes that arrive may let the next one end
  }

  JETRL_DEVICE void wait_full(int stage) const {
    sm90::barrier_wait(full_barrier(stage), parity >> stage & 1, "full", stage);
  }

  // By a whole consumer warp that has read the stage: one arrival in each block of the cluster.
  template <int kCluster>
  JETRL_DEVICE void release(int stage, int lane) const {
    sm90::sync_warp();
    if constexpr (kCluster == 1) {
      if (kAllLanesRelease || lane == 0) sm90::barrier_arrive(empty_barrier(stage));
    } else {
      arrive_at_blocks<kCluster>(empty_barrier(stage), lane);
    }
  }

  // Address where this lane's releases arrive, if it has a block of the cluster: a register that saves three
  // instructions between the end of a chain and the release.
  template <int kCluster>
  JETRL_DEVICE uint32_t place_of_releases(int lane) const {
    return kCluster == 1 ? empty : sm90::address_in_cluster(empty, lane < kCluster ? lane : 0);
  }

  template <int kCluster>
  JETRL_DEVICE void release(int stage, int lane, uint32_t place) const {
    if constexpr (kCluster == 1 || kAllLanesRelease) {
      release<kCluster>(stage, lane);
    } else {
      sm90::sync_warp();
      if (lane < kCluster) sm90::barrier_arrive_in_cluster(place + 8 * stage);
    }
  }
};

}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// FProp and DGrad on Hopper: Y[M,N] = X[M,K] W[N,K]^T (+ bias), 1x128 scales on X, 128x128 scales on W, BF16 out.
//
// Arithmetic: per 128-wide K block a chain of four wgmma m64n128k32 (n64, n192 in tiles of 64, 192 columns) starts from
// zero; its FP32 partial sum p is promoted by acc = fma(p, s_x * s_w, acc), K blocks ascending. Tiles, clusters and the
// order of warps do not change this chain, so they change the speed only.
//
// Roles (384 threads, one persistent block per multiprocessor): warpgroup 0 copies, one warp qdata and, where
// scales_suit_tma, the scales of X by TMA, else another warp those by cp.async, one warp the scales of W; warpgroups 1
// and 2 own 64 rows each. A warpgroup promotes its chain while the other's runs.
//
// Edges: TMA and cp.async fill with zeros, so partial sums there are zero, and TMA does not store there. The last group
// of K is short but has a scale. With an odd number of row tiles the last cluster's second block computes zeros that
// are not stored. What limits the kernel: docs/log.md.

#pragma once

#include "epilogue.cuh"
#include "launch.h"
#include "pipeline.cuh"
#include "segments.cuh"
#include "tile_ring.cuh"

namespace jetrl {

namespace {

struct FpropParams {
  Scales x_scales, w_scales;
  Bias bias;
  Output y;
  int m, n, k_blocks;
  int rank_blocks;  // K blocks per rank in a sum of ranks' products
  bool tma_scales;  // of X
  TileOrder order;  // of cluster tiles: kCluster * kBlockM rows x kBlockN columns
  // Grouped products; there tiles_n counts cluster tiles of kBlockM rows x kCluster * kBlockN columns.
  Segments segments = {nullptr, 0};
  int w_row_step = 0, w_column_step = 0;
  int64_t w_scale_step = 0;
  int slice_tiles_n = 0, slice_rows = 0;  // of one slice of K: its part of tiles_n, and of the rows of Y
};

// A warp's first element of an output tile. In a grouped product `end` is the row after the expert's last.
struct Corner {
  int row, column, end = 0;
};

// A block's output tile; in a dense product expert and slice are 0.
struct FpropTile {
  int row, column, end, expert, slice = 0;
};

template <class Shape>
JETRL_DEVICE FpropTile dense_tile(const FpropParams& p, int tile, int rank) {
  int tile_m, tile_n;
  p.order.locate(tile, tile_m, tile_n);
  return {(tile_m * Shape::kCluster + rank) * Shape::kBlockM, tile_n * Shape::kBlockN, 0, 0};
}

// kRanks: a sum of tensor-parallel ranks' products over equal slices of K. At the end of a slice total += bf16(acc) in
// FP32, slices ascending, while the next slice's first chain runs; total is rounded once. It starts as -0, which leaves
// every number unchanged.
//
// kGrouped: a product for the rows of each expert (gemm.h, Segments) with its own W; a tile has rows of one expert. The
// warp that copies qdata finds the tiles and passes them to the consumers with stage 0. Blocks of a cluster take
// neighboring columns and share X (dense: neighboring rows, shared W). With several slices of K, each a product, a tile
// is of one slice, k_blocks long, and only the warps that copy know at which columns it begins.
//
// The tile is 128 x 256, as large as registers allow: a consumer thread keeps 2 x 64 accumulators and 64 partial sums,
// 192 of its 240 registers (504 of 512 go to the three warpgroups: 240, 240, 24). Tiles of 192 (one chain per
// warpgroup), 128 or 64 columns may take less time where 256 leave multiprocessors idle in the last round (kTiles). A
// sum of ranks' products keeps as many totals as accumulators: 3 x 64 for 128 columns.
template <int kBlockN_, int kCluster_, bool kRanks_ = false, bool kGrouped_ = false>
struct FpropShape {
  static constexpr int kBlockM = 128, kBlockN = kBlockN_, kCluster = kCluster_;
  static constexpr bool kRanks = kRanks_, kGrouped = kGrouped_;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kChunk = kBlockN == 256 ? 128 : kBlockN, kSums = kChunk / 2;  // columns of a chain, its sums
  static constexpr int kChunks = kBlockN / kChunk;  // a consumer warpgroup has 64 rows of each
  static constexpr int kStages = kBlockN >= 192 ? 4 : kBlockN == 128 ? 5 : 8;
  static constexpr int kTileX = kBlockM * kGroup, kTileW = kBlockN * kGroup;
  // Columns that share a scale of W wherever the tile begins, and how many such parts a tile has; kRoom: padded for one
  // read.
  static constexpr int kPart = kBlockN % kGroup == 0 ? kGroup : 64, kParts = kBlockN / kPart;
  static constexpr int kRoom = kParts == 3 ? 4 : kParts, kScalesW = kStages * kRoom;
  // Byte offsets in shared memory.
  static constexpr int kAtW = kStages * kTileX;
  static constexpr int kAtStaging = kAtW + kStages * kTileW;
  static constexpr int kStaging = kChunk / kStoreColumns * kStagingBytes;  // of a warp
  static constexpr int kAtScales = kAtStaging + 4 * kConsumers * kStaging;
  static constexpr int kAtScalesW = kAtScales + kStages * kBlockM * 4;  // of two rounds
  static constexpr int kAtFull = kAtScalesW + 2 * kScalesW * 4;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kAtTiles = round_up(kAtEmpty + 8 * kStages, 16);  // an int4 of every second tile of a block:
                                                                         // its row, column and end
  static constexpr int kBytes = kAtTiles + (kGrouped ? 2 * 16 : 0);

  static_assert(!kRanks || kBlockN <= 128, "accumulators and totals do not fit into registers");
  static_assert(kChunk % kPart == 0 && kScalesW <= 32, "a chain is made of parts, and a lane has a part of a stage");
  static_assert(kTileX % 1024 == 0 && kTileW % 1024 == 0, "operand tiles start on whole swizzle atoms");
  static_assert(kAtScales % 128 == 0, "TMA writes scales to multiples of 128 bytes");
  static_assert(kAtFull % 8 == 0, "mbarriers are 8 bytes, aligned");
  static_assert(kBytes <= kSharedMemory, "the stages do not fit into shared memory");
};

// By a whole warp: visit(tile, odd) for each tile of this block; `odd` alternates.
template <class Shape, class Visit>
JETRL_DEVICE void fprop_tiles(const FpropParams& p, int rank, int lane, const Visit& visit) {
  if constexpr (Shape::kGrouped) {
    SegmentTiles<Shape::kBlockM> tiles{p.segments, p.order.tiles_n};
    SegmentTile at;
    int odd = 0;
    for (int tile = first_tile<Shape::kCluster>(); tiles.locate(tile, lane, at); tile += tile_step<Shape::kCluster>()) {
      int slice = 0;
      for (; at.tile_n >= p.slice_tiles_n; at.tile_n -= p.slice_tiles_n) ++slice;
      visit(FpropTile{at.row, (at.tile_n * Shape::kCluster + rank) * Shape::kBlockN, at.end, at.expert, slice}, odd);
      odd ^= 1;
    }
  } else {
    for (int tile = first_tile<Shape::kCluster>(); tile < p.order.count(); tile += tile_step<Shape::kCluster>()) {
      visit(dense_tile<Shape>(p, tile, rank), 0);
    }
  }
}

// By a warp that copies: bring(stage, full, block, tile, odd) for all K blocks of all tiles, with the stage's barrier.
// All lanes run the loop, which keeps addresses in uniform registers; one is elected where one acts.
template <class Shape, class Bring>
JETRL_DEVICE void fprop_fill(const FpropParams& p, TileRing<Shape::kStages> ring, int rank, int lane,
                             const Bring& bring) {
  fprop_tiles<Shape>(p, rank, lane, [&](const FpropTile& at, int odd) {
    int stage = 0;
    for (int block = 0; block < p.k_blocks; ++block) {
      ring.wait_empty(stage);
      bring(stage, ring.full_barrier(stage), block, at, odd);
      ring.used(stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  });
}

// By a warp: copies qdata, and the scales of X where scales_suit_tma. A tile's place goes to the consumers with its
// first stage; they read it at the end, and have read that of two tiles ago when they release the last tile's stage 0.
template <class Shape>
JETRL_DEVICE void fprop_copy(const sm90::TensorMap* x_map, const sm90::TensorMap* w_map,
                             const sm90::TensorMap* x_scales_map, const FpropParams& p, uint8_t* memory, uint32_t base,
                             TileRing<Shape::kStages> ring, int rank, int lane) {
  fprop_fill<Shape>(p, ring, rank, lane, [&](int stage, uint32_t full, int block, const FpropTile& at, int odd) {
    if (!sm90::elect_one()) return;
    const uint32_t x = base + stage * Shape::kTileX, w = base + Shape::kAtW + stage * Shape::kTileW;
    const uint32_t x_scales = base + Shape::kAtScales + stage * Shape::kBlockM * 4;
    if (Shape::kGrouped && block == 0) {
      const int above = at.slice * p.slice_rows;
      *reinterpret_cast<int4*>(memory + Shape::kAtTiles + 16 * odd) = {above + at.row, at.column, above + at.end, 0};
    }
    sm90::barrier_arrive_expect(full, Shape::kTileX + Shape::kTileW + (p.tma_scales ? Shape::kBlockM * 4 : 0));
    if constexpr (Shape::kGrouped) {
      const int of_k = at.slice * p.k_blocks + block;
      load_shared_tile<Shape::kBlockM, Shape::kCluster>(x, x_map, of_k * kGroup, at.row, rank, full);
      sm90::tma_load(w, w_map, at.expert * p.w_column_step + of_k * kGroup, at.expert * p.w_row_step + at.column,
                     full);
      if (p.tma_scales) {
        load_shared_scales<Shape::kBlockM, Shape::kCluster>(x_scales, x_scales_map, at.row, of_k, rank, full);
      }
    } else {
      sm90::tma_load(x, x_map, block * kGroup, at.row, full);
      load_shared_tile<Shape::kBlockN, Shape::kCluster>(w, w_map, block * kGroup, at.column, rank, full);
      if (p.tma_scales) sm90::tma_load(x_scales, x_scales_map, at.row, block, full);
    }
  });
}

// By a warp: copies the scales of W, for all K blocks of a round of the ring at once, a lane per K block and part of
// the columns. They come with stage 0, in turn to two places: when round r - 1 has released its stage 0, round r - 2,
// whose scales round r overwrites, is over. (With every K block instead: 1% slower at 25 instructions, 2.5% at 45.)
template <class Shape>
JETRL_DEVICE void fprop_copy_w_scales(const FpropParams& p, uint32_t base, TileRing<Shape::kStages> ring, int rank,
                                      int lane) {
  const int stage = lane / Shape::kRoom, part = lane % Shape::kRoom;
  uint32_t to = base + Shape::kAtScalesW + 4 * lane, other = to + 4 * Shape::kScalesW;
  fprop_tiles<Shape>(p, rank, lane, [&](const FpropTile& at, int) {
    const int row = (at.column + part * Shape::kPart) / kGroup;
    const bool row_exists = row < ceil_div(p.n, kGroup);
    const float* from = p.w_scales.data + row * p.w_scales.stride_row + stage * p.w_scales.stride_group;
    if constexpr (Shape::kGrouped) {
      from += at.expert * p.w_scale_step + at.slice * p.k_blocks * p.w_scales.stride_group;
    }
    for (int first = 0; first < p.k_blocks; first += Shape::kStages) {
      ring.wait_empty(0);
      if (lane < Shape::kScalesW) {
        sm90::cp_async_f32(to, from, row_exists && first + stage < p.k_blocks);
        sm90::cp_async_arrive(ring.full_barrier(0));
      }
      ring.used(0);
      from += Shape::kStages * p.w_scales.stride_group;
      const uint32_t last = to;
      to = other, other = last;
    }
  });
}

// By a warp: copies scales of X that the copy engine cannot read.
template <class Shape>
JETRL_DEVICE void fprop_copy_x_scales(const FpropParams& p, uint32_t base, TileRing<Shape::kStages> ring, int rank,
                                      int lane) {
  fprop_fill<Shape>(p, ring, rank, lane, [&](int stage, uint32_t full, int block, const FpropTile& at, int) {
    load_scales<Shape::kBlockM>(base + Shape::kAtScales + stage * Shape::kBlockM * 4, p.x_scales,
                                at.slice * p.k_blocks + block, at.row, p.m, lane);
    sm90::cp_async_arrive(full);
  });
}

// A consumer warp, with its tile in registers. Every instruction between two chains costs time, so stages are static
// (tile_ring.cuh), the target of releases is computed once, and the loop tests for the end of a tile only in its last
// round. The wait for the next block stands after the FMAs here; ptxas tests the barrier before them and branches
// after.
//
// No thread waits at the end of a tile: the sums stay in registers until the next tile's first block. While its chain
// for the same columns runs, they are packed into staging, from where the copy engine stores them.
template <class Shape>
struct FpropConsumer {
  static constexpr int kChunks = Shape::kChunks, kSums = Shape::kSums, kStages = Shape::kStages;
  static constexpr int kPartsOfChain = Shape::kParts / kChunks;

  const FpropParams& p;
  TileRing<kStages> ring;
  uint64_t x_descriptor, w_descriptor;
  const float *x_scales, *w_scales;
  const sm90::TensorMap* y_map;
  uint32_t staging;
  uint8_t* memory;
  int lane;
  uint32_t place_of_releases;
  int round_at = Shape::kScalesW;  // offset of this round in w_scales: 0 or kScalesW
  float partial[kSums];
  float acc[kChunks][kSums];
  float total[Shape::kRanks ? kSums : 1];  // of the ranks before this one
  int left_of_rank = 0;                    // K blocks

  // Rounds and adds a rank's product.
  JETRL_DEVICE void end_rank() {
#pragma unroll
    for (int j = 0; j < kSums; j += 2) {
      const uint32_t rounded = sm90::pack_bf16(acc[0][j], acc[0][j + 1]);
      total[j] = sm90::add(total[j], sm90::low_half(rounded));
      total[j + 1] = sm90::add(total[j + 1], sm90::high_half(rounded));
    }
  }

  template <int kCount>
  JETRL_DEVICE static void fill(float (&values)[kCount], float with) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = with;
  }

  JETRL_DEVICE void store(int chunk, Corner of_tile) {
    if constexpr (Shape::kRanks) {
      end_rank();
      store_bf16_by_tma(staging, total, Bias{nullptr, false}, y_map, of_tile.row, of_tile.column, p.n, lane);
      return;
    }
    const int column = of_tile.column + Shape::kChunk * chunk;
    if constexpr (!Shape::kGrouped) {
      store_bf16_by_tma(staging, acc[chunk], p.bias, y_map, of_tile.row, column, p.n, lane);
      return;
    }
    constexpr int kSlices = Shape::kChunk / kStoreColumns;
    stage_for_tma<true>(staging, acc[chunk], Bias{nullptr, false}, column, p.n, lane);
    if (of_tile.row + kStoreRows <= of_tile.end) {
      store_staged_by_tma<true, kSlices>(staging, y_map, of_tile.row, column, lane);
    } else {
      const uint8_t* staged = memory + (staging - sm90::shared_address(memory));
      store_staged_rows<kSlices>(staged, p.y, of_tile.row, of_tile.end, column, p.n, lane);
    }
  }

  // Reads the scales of W of a stage, one per part of the columns.
  JETRL_DEVICE void read_w_scales(float (&values)[Shape::kParts], int stage) const {
    const float* from = w_scales + round_at + Shape::kRoom * stage;
    if constexpr (Shape::kParts == 3) {
      const float4 all = *reinterpret_cast<const float4*>(from);
      values[0] = all.x, values[1] = all.y, values[2] = all.z;
    } else if constexpr (Shape::kParts == 2) {
      const float2 both = *reinterpret_cast<const float2*>(from);
      values[0] = both.x, values[1] = both.y;
    } else {
      values[0] = *from;
    }
  }

  // One K block, and the wait for the next unless it is the last. A tile's first one starts its sums; each chunk of the
  // sums of the tile `before`, if there was one (row >= 0), is stored while this block's chain for it runs.
  template <bool kFirst>
  JETRL_DEVICE void block(int stage, bool last, Corner before = {-1, 0}) {
    const uint64_t x = x_descriptor + stage * (Shape::kTileX / 16), w = w_descriptor + stage * (Shape::kTileW / 16);
    const float x_upper = x_scales[stage * Shape::kBlockM], x_lower = x_scales[stage * Shape::kBlockM + 8];
    float of_w[Shape::kParts];
    if (stage == 0) round_at = Shape::kScalesW - round_at;
    read_w_scales(of_w, stage);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float upper[kPartsOfChain], lower[kPartsOfChain];
#pragma unroll
      for (int i = 0; i < kPartsOfChain; ++i) {
        upper[i] = sm90::multiply(x_upper, of_w[kPartsOfChain * c + i]);
        lower[i] = sm90::multiply(x_lower, of_w[kPartsOfChain * c + i]);
      }
      issue_chain<Shape::kChunk>(partial, x, w + 2 * c * kDescriptorStep64Rows);
      if (kFirst && before.row >= 0) store(c, before);
      if constexpr (Shape::kRanks) {
        if (kFirst) {
          fill(total, -0.0f);
          left_of_rank = p.rank_blocks;
        } else if (left_of_rank == 0) {
          end_rank();
          fill(acc[0], 0.0f);
          left_of_rank = p.rank_blocks;
        }
        --left_of_rank;
      }
      sm90::wgmma_wait<0>(partial);
      if (c == kChunks - 1) {
        ring.used(stage);
        ring.template release<Shape::kCluster>(stage, lane, place_of_releases);
      }
#pragma unroll
      for (int j = 0; j < kSums; j += 4) {
        const int i = 2 * j / Shape::kPart;
        acc[c][j] = sm90::multiply_add(partial[j], upper[i], kFirst ? 0.0f : acc[c][j]);
        acc[c][j + 1] = sm90::multiply_add(partial[j + 1], upper[i], kFirst ? 0.0f : acc[c][j + 1]);
        acc[c][j + 2] = sm90::multiply_add(partial[j + 2], lower[i], kFirst ? 0.0f : acc[c][j + 2]);
        acc[c][j + 3] = sm90::multiply_add(partial[j + 3], lower[i], kFirst ? 0.0f : acc[c][j + 3]);
      }
    }
    if (!last) ring.wait_full((stage + 1) % kStages);
  }
};

template <class Shape>
JETRL_DEVICE void fprop_consume(const FpropParams& p, const sm90::TensorMap* y_map, uint8_t* memory,
                                TileRing<Shape::kStages> ring, int consumer, int rank, int warp, int lane) {
  constexpr int kStages = Shape::kStages;
  const int k_blocks = p.k_blocks;
  const int first_row = 64 * consumer, fragment_row = 16 * warp + lane / 4;
  const uint32_t base = sm90::shared_address(memory);
  FpropConsumer<Shape> tiles{p,
                             ring,
                             operand_descriptor(base) + consumer * kDescriptorStep64Rows,
                             operand_descriptor(base + Shape::kAtW),
                             reinterpret_cast<const float*>(memory + Shape::kAtScales) + first_row + fragment_row,
                             reinterpret_cast<const float*>(memory + Shape::kAtScalesW),
                             y_map,
                             base + Shape::kAtStaging + (4 * consumer + warp) * Shape::kStaging,
                             memory,
                             lane,
                             ring.template place_of_releases<Shape::kCluster>(lane)};
  Corner before{-1, 0};
  // In a grouped product twice the number of tiles left, plus one at every second tile: saves a register.
  int tile = first_tile<Shape::kCluster>();
  if constexpr (Shape::kGrouped) {
    const int step = tile_step<Shape::kCluster>();
    tile = 2 * ceil_div(SegmentTiles<Shape::kBlockM>{p.segments, p.order.tiles_n}.count(lane) - tile, step);
  }
  while (Shape::kGrouped ? tile >= 2 : tile < p.order.count()) {
    tiles.ring.wait_full(0);
    tiles.template block<true>(0, k_blocks == 1, before);
    int left = k_blocks - 1;
    for (; left > kStages; left -= kStages) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) tiles.template block<false>((1 + i) % kStages, false);
    }
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (i >= left) break;
      tiles.template block<false>((1 + i) % kStages, i + 1 >= left);
    }
    if constexpr (Shape::kGrouped) {
      const int4 at = *reinterpret_cast<const int4*>(memory + Shape::kAtTiles + 16 * (tile & 1));
      before = {at.x + first_row + 16 * warp, at.y, at.z};
      tile = (tile - 2) ^ 1;
    } else {
      const FpropTile at = dense_tile<Shape>(p, tile, rank);
      before = {at.row + first_row + 16 * warp, at.column};
      tile += tile_step<Shape::kCluster>();
    }
  }
  if (before.row >= 0) {
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) tiles.store(c, before);
  }
  if (acts_for_copies<Shape::kGrouped>(lane)) sm90::tma_store_wait_read();
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_fprop(JETRL_GRID_CONSTANT sm90::TensorMap x_map, JETRL_GRID_CONSTANT sm90::TensorMap w_map,
               JETRL_GRID_CONSTANT sm90::TensorMap x_scales_map, JETRL_GRID_CONSTANT sm90::TensorMap y_map,
               JETRL_GRID_CONSTANT FpropParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const TileRing<Shape::kStages> ring{base + Shape::kAtFull, base + Shape::kAtEmpty};
  const int thread = sm90::thread_index(), lane = thread % 32;
  const int warp = sm90::warp_uniform(thread / 32), warpgroup = warp / 4;
  const int rank = Shape::kCluster == 1 ? 0 : sm90::rank_in_cluster();

  if (thread == 0) {
    sm90::prefetch_tensor_map(&x_map);
    sm90::prefetch_tensor_map(&w_map);
    sm90::prefetch_tensor_map(&y_map);
    if (p.tma_scales) sm90::prefetch_tensor_map(&x_scales_map);
    ring.template init<Shape::kCluster, 4 * Shape::kConsumers>(p.tma_scales ? 1 : 1 + 32, Shape::kScalesW);
  }
  sync_cluster_or_block<Shape::kCluster>();

  if (warpgroup == 0) {
    sm90::give_registers<24>();
    if (warp == 3 || (warp == 2 && p.tma_scales)) return;  // instead of waiting below until the kernel ends
    if (warp == 2) {
      fprop_copy_x_scales<Shape>(p, base, ring, rank, lane);
    } else if (warp == 1) {
      fprop_copy_w_scales<Shape>(p, base, ring, rank, lane);
    } else {
      fprop_copy<Shape>(&x_map, &w_map, &x_scales_map, p, memory, base, ring, rank, lane);
    }
  } else {
    sm90::take_registers<240>();
    fprop_consume<Shape>(p, &y_map, memory, ring, warpgroup - 1, rank, warp % 4, lane);
  }
  // No block exits while another of its cluster may still arrive at its barriers.
  if (Shape::kCluster > 1) sm90::sync_cluster();
}

}  // namespace

}  // namespace jetrl

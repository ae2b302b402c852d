// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// WGrad on Hopper: dW[N,K] = dY[T,N]^T X[T,K], contracted over tokens. Both operands come transposed, A = dY^T [N,T]
// and B = X^T [K,T], with 1x128 scales along T; dW is BF16 or FP32.
//
// Arithmetic as in FProp: a chain of four wgmma per 128 tokens from zero, then acc = fma(p, s_a * s_b, acc), tokens
// ascending. Since s_b differs by column, every element takes a multiplication next to its FMA: promotion is the limit.
//
// Roles and edges as in the FProp kernel, except: one warp copies everything; a consumer warpgroup owns half the rows
// of the tile and all its columns; the blocks of a cluster take neighboring columns and share rows; stores are guarded.
// T need not be a multiple of 128: TMA fills qdata with zeros after T, and the last group has a scale.

#include <algorithm>

#include "wgrad.cuh"

namespace jetrl {

namespace {

struct WgradParams {
  Scales a_scales, b_scales;
  Output dw;
  int n, k, t_blocks;
  bool tma_scales;
  TileOrder order;  // of cluster tiles: kBlockM rows x kCluster * 128 columns
};

template <class Shape>
JETRL_DEVICE void wgrad_produce(const sm90::TensorMap* a_map, const sm90::TensorMap* b_map,
                                const sm90::TensorMap* a_scales_map, const sm90::TensorMap* b_scales_map,
                                const WgradParams& p, uint8_t* memory, TileRing<Shape::kStages> ring, int rank,
                                int lane) {
  const uint32_t base = sm90::shared_address(memory);
  for (int tile = first_tile<Shape::kCluster>(); tile < p.order.count(); tile += tile_step<Shape::kCluster>()) {
    int tile_m, tile_n;
    p.order.locate(tile, tile_m, tile_n);
    const int row = tile_m * Shape::kBlockM, column = (tile_n * Shape::kCluster + rank) * Shape::kBlockN;
    int stage = 0;
    for (int block = 0; block < p.t_blocks; ++block) {
      ring.wait_empty(stage);
      const uint32_t full = ring.full_barrier(stage);
      const uint32_t a_scales = base + Shape::kAtScales + stage * Shape::kScales * 4;
      const uint32_t b_scales = a_scales + 4 * Shape::kBlockM;
      if (lane == 0) {
        sm90::barrier_arrive_expect(full, Shape::kTileA + Shape::kTileB + (p.tma_scales ? Shape::kScales * 4 : 0));
        load_shared_tile<Shape::kBlockM, Shape::kCluster>(base + stage * Shape::kTileA, a_map, block * kGroup, row,
                                                          rank, full);
        sm90::tma_load(base + Shape::kAtB + stage * Shape::kTileB, b_map, block * kGroup, column, full);
        if (p.tma_scales) {
          load_shared_scales<Shape::kBlockM, Shape::kCluster>(a_scales, a_scales_map, row, block, rank, full);
          sm90::tma_load(b_scales, b_scales_map, column, block, full);
        }
      }
      if (!p.tma_scales) {
        load_scales<Shape::kBlockM>(a_scales, p.a_scales, block, row, p.n, lane);
        load_scales<Shape::kBlockN>(b_scales, p.b_scales, block, column, p.k, lane);
        sm90::cp_async_arrive(full);
      }
      ring.used(stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  }
}

template <class Shape>
JETRL_DEVICE void wgrad_consume(const WgradParams& p, uint8_t* memory, TileRing<Shape::kStages> ring, int consumer,
                                int rank, int warp, int lane) {
  constexpr int kChunks = Shape::kChunks, kStages = Shape::kStages;
  const int t_blocks = p.t_blocks;
  const int first_row = consumer * kChunks * 64, fragment_row = 16 * warp + lane / 4;
  const uint32_t base = sm90::shared_address(memory);
  const uint64_t a_descriptor = operand_descriptor(base) + consumer * kChunks * kDescriptorStep64Rows;
  const uint64_t b_descriptor = operand_descriptor(base + Shape::kAtB);
  uint8_t* staging = memory + Shape::kAtStaging + (4 * consumer + warp) * kStagingBytes;
  const float* all_scales = reinterpret_cast<const float*>(memory + Shape::kAtScales);
  const float* row_scales = all_scales + first_row + fragment_row;
  const float* column_scales = all_scales + Shape::kBlockM + 2 * (lane % 4);
  const uint32_t turns = base + Shape::kAtTurns;
  const uint32_t my_turn = turns + 8 * consumer, other_turn = turns + 8 * (consumer ^ 1);
  // Chain i of warpgroup 1 waits for phase i of its turns, that of warpgroup 0, which is first, for phase i - 1.
  uint32_t turn = consumer == 0 ? 1 : 0;

  // Kept: 1.1% faster than recomputed with BF16 output (H200), 1.2% slower with FP32 output: one more register.
  const uint32_t place_of_releases = ring.template place_of_releases<Shape::kCluster>(lane);

  float partial[64];
  for (int tile = first_tile<Shape::kCluster>(); tile < p.order.count(); tile += tile_step<Shape::kCluster>()) {
    float acc[kChunks][64];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[c][i] = 0.0f;
    }
    ring.wait_full(0);
    for (int first = 0; first < t_blocks; first += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (stage != 0 && first + stage >= t_blocks) break;
        const uint64_t a = a_descriptor + stage * (Shape::kTileA / 16);
        const uint64_t b = b_descriptor + stage * (Shape::kTileB / 16);
        float2 columns[16];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if constexpr (Shape::kTurns) {
            sm90::barrier_wait(my_turn, turn, "turn", consumer);
            turn ^= 1;
          }
          issue_chain<128>(partial, a + c * kDescriptorStep64Rows, b);
          if constexpr (Shape::kTurns) {
            sm90::sync_warp();  // no lane still waits for the turn
            if (lane == 0) sm90::barrier_arrive(other_turn);
          }
          // While the chain runs: scales, and the wait for the next block.
          const float upper = row_scales[stage * Shape::kScales + 64 * c];
          const float lower = row_scales[stage * Shape::kScales + 64 * c + 8];
          if (c == 0) {
#pragma unroll
            for (int g = 0; g < 16; ++g) {
              columns[g] = *reinterpret_cast<const float2*>(column_scales + stage * Shape::kScales + 8 * g);
            }
          }
          if (c == kChunks - 1) {
            ring.used(stage);
            if (first + stage + 1 < t_blocks) ring.wait_full((stage + 1) % kStages);
          }
          sm90::wgmma_wait<0>(partial);
          if (c == kChunks - 1) {
            if constexpr (Shape::kTurns) {
              ring.template release<Shape::kCluster>(stage, lane);
            } else {
              ring.template release<Shape::kCluster>(stage, lane, place_of_releases);
            }
          }
          promote(acc[c], partial, columns, upper, lower);
        }
      }
    }
    int tile_m, tile_n;
    p.order.locate(tile, tile_m, tile_n);
    const int column = (tile_n * Shape::kCluster + rank) * Shape::kBlockN;
    const int my_lane = only_here(lane);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int row = tile_m * Shape::kBlockM + first_row + 64 * c + 16 * warp;
      if constexpr (Shape::kFp32) {
        store_fp32(staging, acc[c], p.dw, row, column, p.n, p.k, my_lane);
      } else {
        store_bf16(staging, acc[c], p.dw, row, column, p.n, p.k, my_lane);
      }
    }
  }
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_wgrad(JETRL_GRID_CONSTANT sm90::TensorMap a_map, JETRL_GRID_CONSTANT sm90::TensorMap b_map,
               JETRL_GRID_CONSTANT sm90::TensorMap a_scales_map, JETRL_GRID_CONSTANT sm90::TensorMap b_scales_map,
               JETRL_GRID_CONSTANT WgradParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const TileRing<Shape::kStages> ring{base + Shape::kAtFull, base + Shape::kAtEmpty};
  const int thread = sm90::thread_index(), lane = thread % 32;
  const int warp = sm90::warp_uniform(thread / 32), warpgroup = warp / 4;
  const int rank = Shape::kCluster == 1 ? 0 : sm90::rank_in_cluster();

  if (thread == 0) {
    sm90::prefetch_tensor_map(&a_map);
    sm90::prefetch_tensor_map(&b_map);
    if (p.tma_scales) sm90::prefetch_tensor_map(&a_scales_map), sm90::prefetch_tensor_map(&b_scales_map);
    for (int g = 0; g < Shape::kConsumers; ++g) sm90::barrier_init(base + Shape::kAtTurns + 8 * g, 4);
    ring.template init<Shape::kCluster, 4 * Shape::kConsumers>(p.tma_scales ? 1 : 1 + 32);
  }
  sync_cluster_or_block<Shape::kCluster>();

  if (warpgroup == 0) {
    sm90::give_registers<24>();
    if (warp != 0) return;  // instead of waiting below until the kernel ends
    wgrad_produce<Shape>(&a_map, &b_map, &a_scales_map, &b_scales_map, p, memory, ring, rank, lane);
  } else {
    sm90::take_registers<240>();
    wgrad_consume<Shape>(p, memory, ring, warpgroup - 1, rank, warp % 4, lane);
  }
  // No block exits while another of its cluster may still arrive at its barriers.
  if (Shape::kCluster > 1) sm90::sync_cluster();
}

template <class Shape>
void run_wgrad(const Operand& a, const Operand& b, int t, const Output& dw, Stream stream) {
  const TileOrder order{ceil_div(a.rows, Shape::kBlockM), ceil_div(b.rows, Shape::kCluster * Shape::kBlockN),
                        2048 / Shape::kBlockM};
  const int t_blocks = ceil_div(t, kGroup);
  const bool tma_scales = scales_suit_tma(a.scales, a.rows) && scales_suit_tma(b.scales, b.rows);
  const WgradParams p{a.scales, b.scales, dw, a.rows, b.rows, t_blocks, tma_scales, order};
  const auto a_map = operand_map(a, t, Shape::kBlockM / Shape::kCluster);
  const auto b_map = operand_map(b, t, Shape::kBlockN);
  const auto a_scales_map =
      tma_scales ? scales_map(a.scales, a.rows, t_blocks, Shape::kBlockM / Shape::kCluster) : a_map;
  const auto b_scales_map = tma_scales ? scales_map(b.scales, b.rows, t_blocks, Shape::kBlockN) : b_map;
  const int clusters = std::min(order.count(), multiprocessors() / Shape::kCluster);
  const Grid grid{clusters * Shape::kCluster, Shape::kCluster, Shape::kThreads, Shape::kBytes, stream};
  launch<sm90_wgrad<Shape>>(grid, a_map, b_map, a_scales_map, b_scales_map, p);
}

template <int kBlockM, int kCluster>
void run_wgrad(const Operand& a, const Operand& b, int t, const Output& dw, Stream stream) {
  if (dw.fp32) return run_wgrad<WgradShape<kBlockM, kCluster, true>>(a, b, t, dw, stream);
  return run_wgrad<WgradShape<kBlockM, kCluster, false>>(a, b, t, dw, stream);
}

// Tiles of 128 rows halve the work but need more bytes per cycle, which costs about a tenth of the speed.
constexpr TileCost kTiles[] = {{256, 20}, {128, 11}};

}  // namespace

void wgrad(const Operand& a, const Operand& b, int t, const Output& dw, Config config, Stream stream) {
  const int block = config.block ? config.block : choose_block(kTiles, a.rows, b.rows, multiprocessors());
  const int cluster = config.cluster ? config.cluster : b.rows > 128 ? 2 : 1;
  switch (block * 10 + cluster) {
    case 1281: return run_wgrad<128, 1>(a, b, t, dw, stream);
    case 1282: return run_wgrad<128, 2>(a, b, t, dw, stream);
    case 2561: return run_wgrad<256, 1>(a, b, t, dw, stream);
    case 2562: return run_wgrad<256, 2>(a, b, t, dw, stream);
    default:
      refuse("wgrad: tiles have 128 or 256 rows and clusters 1 or 2 blocks; leave them 0 for the kernel's choice");
  }
}

}  // namespace jetrl

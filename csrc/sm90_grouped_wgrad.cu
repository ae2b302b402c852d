// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// WGrad of a mixture's experts on Hopper: dW[e] = dY^T X over the tokens of expert e, BF16; arithmetic, roles and tiles
// of sm90_wgrad_1x128_1x128.cu. An expert's tokens are a few groups of 128, so tiles are short:
//
//   - No thread waits at the end of a tile. Sums stay in registers until the next tile's first group, where each chunk
//     of 64 rows is stored while that group's chain for it runs.
//   - Tiles go by experts, the longest first, in rounds of all clusters; every second round is reversed. So clusters
//     differ by less than the longest tile, whatever the routing, and tiles in flight are of one or two experts, whose
//     operands are read once from device memory. Each block sorts the experts itself.
//   - Tiles of experts without tokens, the last ones, are zeros, which a block writes first.

#include <algorithm>

#include "wgrad.cuh"

namespace jetrl {

namespace {

constexpr int kMostExperts = 512;

struct GroupedWgradParams {
  Output dw;  // [experts * n, k]
  Segments segments;
  int n, k;
  int tiles_m, tiles_each;  // of an expert: kBlockM rows x kCluster * 128 columns each, down the rows first
};

// An expert's number, its first group of 128 tokens, its number of groups; in the order of computation.
struct alignas(16) Turn {
  int expert, first, groups, unused;
};

template <int kBlockM, int kCluster>
struct GroupedWgradShape : WgradShape<kBlockM, kCluster, false> {
  using Base = WgradShape<kBlockM, kCluster, false>;
  static constexpr int kAtOrder = round_up(Base::kBytes, 16);
  static constexpr int kAtGroups = kAtOrder + 16 * kMostExperts;  // of each expert, by its number
  static constexpr int kAtTiles = kAtGroups + 4 * kMostExperts;  // Place of every second tile of a block
  static constexpr int kBytes = kAtTiles + 2 * 16;

  static_assert(kBytes <= kSharedMemory, "the order of the experts does not fit into shared memory");
};

// A tile's first element in dw, the row after its expert's last, and twice its groups of tokens, plus one in a block's
// last tile.
struct alignas(16) Place {
  int row, column, end, groups;
};

// By all threads of the block.
template <class Shape>
JETRL_DEVICE void sort_experts(const Segments& segments, uint8_t* memory, int thread) {
  Turn* order = reinterpret_cast<Turn*>(memory + Shape::kAtOrder);
  int* groups = reinterpret_cast<int*>(memory + Shape::kAtGroups);
  for (int e = thread; e < segments.experts; e += Shape::kThreads) {
    groups[e] = (segments.start[e + 1] - segments.start[e]) / kGroup;
  }
  sm90::sync_block();
  for (int e = thread; e < segments.experts; e += Shape::kThreads) {
    const int mine = groups[e];
    int place = 0;
    for (int other = 0; other < segments.experts; ++other) {
      const int theirs = groups[other];
      place += theirs > mine || (theirs == mine && other < e);
    }
    order[place] = {e, segments.start[e] / kGroup, mine, 0};
  }
  sm90::sync_block();
}

// By a whole warp: the number of experts with tokens, which come first in the sorted order.
JETRL_DEVICE int experts_with_tokens(const Segments& segments, int lane) {
  int count = 0;
  for (int e = lane; e < round_up(segments.experts, 32); e += 32) {
    count += sm90::count_true(e < segments.experts && segments.start[e + 1] > segments.start[e]);
  }
  return count;
}

// The expert of the block's tile number `tile`, and the tile's row and column.
template <class Shape>
JETRL_DEVICE Turn locate(const GroupedWgradParams& p, const uint8_t* memory, int tile, int rank, int& row,
                         int& column) {
  const int turn = tile / p.tiles_each, in_expert = tile - turn * p.tiles_each, tile_n = in_expert / p.tiles_m;
  row = (in_expert - tile_n * p.tiles_m) * Shape::kBlockM;
  column = (tile_n * Shape::kCluster + rank) * Shape::kBlockN;
  return reinterpret_cast<const Turn*>(memory + Shape::kAtOrder)[turn];
}

// The tile of this cluster in a round of all clusters: every second round is reversed.
template <class Shape>
JETRL_DEVICE int tile_of_round(int round) {
  const int clusters = tile_step<Shape::kCluster>(), cluster = first_tile<Shape::kCluster>();
  return round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
}

// The number of this cluster's tiles among the first `count`.
template <class Shape>
JETRL_DEVICE int rounds_of(int count) {
  const int whole = count / tile_step<Shape::kCluster>();
  return whole + (tile_of_round<Shape>(whole) < count);
}

// By a warp.
template <class Shape>
JETRL_DEVICE void grouped_wgrad_copy(const sm90::TensorMap* a_map, const sm90::TensorMap* b_map,
                                     const sm90::TensorMap* a_scales_map, const sm90::TensorMap* b_scales_map,
                                     const GroupedWgradParams& p, uint8_t* memory, uint32_t base,
                                     TileRing<Shape::kStages> ring, int rank, int lane) {
  const int rounds = rounds_of<Shape>(experts_with_tokens(p.segments, lane) * p.tiles_each);
  for (int round = 0; round < rounds; ++round) {
    int row, column;
    const Turn of = locate<Shape>(p, memory, tile_of_round<Shape>(round), rank, row, column);
    int stage = 0;
    for (int group = 0; group < of.groups; ++group) {
      ring.wait_empty(stage);
      const uint32_t full = ring.full_barrier(stage);
      const uint32_t a_scales = base + Shape::kAtScales + stage * Shape::kScales * 4;
      const uint32_t b_scales = a_scales + 4 * Shape::kBlockM;
      const int token = (of.first + group) * kGroup;
      if (sm90::elect_one()) {
        if (group == 0) {
          Place& place = *reinterpret_cast<Place*>(memory + Shape::kAtTiles + 16 * (round % 2));
          place = {of.expert * p.n + row, column, (of.expert + 1) * p.n, 2 * of.groups + (round + 1 == rounds)};
        }
        sm90::barrier_arrive_expect(full, Shape::kTileA + Shape::kTileB + Shape::kScales * 4);
        load_shared_tile<Shape::kBlockM, Shape::kCluster>(base + stage * Shape::kTileA, a_map, token, row, rank, full);
        sm90::tma_load(base + Shape::kAtB + stage * Shape::kTileB, b_map, token, column, full);
        load_shared_scales<Shape::kBlockM, Shape::kCluster>(a_scales, a_scales_map, row, of.first + group, rank, full);
        sm90::tma_load(b_scales, b_scales_map, column, of.first + group, full);
      }
      ring.used(stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  }
}

// A warp's first row in its chunks of a tile.
template <class Shape>
JETRL_DEVICE int first_row() {
  const int warp = sm90::thread_index_reread() / 32 - 4;
  return warp / 4 * Shape::kChunks * 64 + warp % 4 * 16;
}

// A consumer warp, with its tile in registers.
template <class Shape>
struct GroupedWgradConsumer {
  static constexpr int kChunks = Shape::kChunks, kStages = Shape::kStages;

  const GroupedWgradParams& p;
  TileRing<kStages> ring;
  uint64_t a_descriptor, b_descriptor;
  const float *row_scales, *column_scales;
  uint8_t* memory;
  uint32_t place_of_releases;  // zero for a lane without one, which saves a register for the lane's number
  float partial[64];
  float acc[kChunks][64];

  // Whether the tile's number is odd, in a bit of the ring that no stage has: saves a register.
  JETRL_DEVICE void next_tile() { ring.parity ^= 1u << 31; }
  JETRL_DEVICE const Place& place() const {
    return *reinterpret_cast<const Place*>(memory + Shape::kAtTiles + 16 * (ring.parity >> 31));
  }
  JETRL_DEVICE const Place& place_before() const {
    return *reinterpret_cast<const Place*>(memory + Shape::kAtTiles + 16 * (~ring.parity >> 31));
  }

  JETRL_DEVICE void store(int chunk, const Place& of) {
    const int thread = sm90::thread_index_reread(), own_lane = thread % 32;
    uint8_t* staging = memory + Shape::kAtStaging + (thread / 32 - 4) * kStagingBytes;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      stage_bf16<false>(sm90::shared_address(staging), acc[chunk], slice, Bias{}, 0, 0, own_lane);
      sm90::sync_warp();
      store_staged_rows<1>(staging, p.dw, of.row + first_row<Shape>() + 64 * chunk, of.end,
                           of.column + kStoreColumns * slice, p.k, own_lane);
      sm90::sync_warp();
    }
  }

  // One group of tokens, and the wait for the next unless it is the last. A tile's first one starts its sums. Each
  // chunk of the previous tile's sums, whose place is valid until stage 0 is released, is stored while this group's
  // chain for it runs; then registers are free for the scales of columns.
  template <bool kFirst>
  JETRL_DEVICE void group(int stage, bool last) {
    const uint64_t a = a_descriptor + stage * (Shape::kTileA / 16), b = b_descriptor + stage * (Shape::kTileB / 16);
    float2 columns[16];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      issue_chain<128>(partial, a + c * kDescriptorStep64Rows, b);
      if (kFirst) store(c, place_before());
      const float upper = row_scales[stage * Shape::kScales + 64 * c];
      const float lower = row_scales[stage * Shape::kScales + 64 * c + 8];
      if (c == 0 || kFirst) {
#pragma unroll
        for (int g = 0; g < 16; ++g) {
          columns[g] = *reinterpret_cast<const float2*>(column_scales + stage * Shape::kScales + 8 * g);
        }
      }
      if (c == kChunks - 1) {
        ring.used(stage);
        if (!last) ring.wait_full((stage + 1) % kStages);
      }
      sm90::wgmma_wait<0>(partial);
      if (c == kChunks - 1) {
        const int lane = place_of_releases != 0 ? 0 : 32;
        ring.template release<Shape::kCluster>(stage, lane, place_of_releases);
      }
      promote<kFirst>(acc[c], partial, columns, upper, lower);
    }
  }
};

// 16 rows x 128 columns of zeros from `row` on.
JETRL_DEVICE void store_zeros(const Output& out, int row, int column, int rows, int columns, int lane) {
  const int at = column + 8 * (lane % 16);
  for (int r = row + lane / 16; r < row + 16 && r < rows && at < columns; r += 2) {
    *reinterpret_cast<Chunk*>(static_cast<uint16_t*>(out.data) + r * out.row_stride + at) = {};
  }
}

// Writes the tiles of this block whose experts have no tokens.
template <class Shape>
JETRL_DEVICE void write_zeros(const GroupedWgradParams& p, const uint8_t* memory, int rank, int lane) {
  const int count = p.segments.experts * p.tiles_each;
  for (int round = rounds_of<Shape>(experts_with_tokens(p.segments, lane) * p.tiles_each);; ++round) {
    const int tile = tile_of_round<Shape>(round);
    if (tile >= count) break;  // in the last round
    int row, column;
    const Turn of = locate<Shape>(p, memory, tile, rank, row, column);
    row += of.expert * p.n + first_row<Shape>();
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) store_zeros(p.dw, row + 64 * c, column, (of.expert + 1) * p.n, p.k, lane);
  }
}

template <class Shape>
JETRL_DEVICE void grouped_wgrad_consume(const GroupedWgradParams& p, uint8_t* memory, TileRing<Shape::kStages> ring,
                                        int consumer, int rank, int warp, int lane) {
  constexpr int kChunks = Shape::kChunks, kStages = Shape::kStages;
  write_zeros<Shape>(p, memory, rank, lane);  // while the first copies run
  const uint32_t base = sm90::shared_address(memory);
  const float* scales = reinterpret_cast<const float*>(memory + Shape::kAtScales);
  GroupedWgradConsumer<Shape> tiles{p,
                                    ring,
                                    operand_descriptor(base) + consumer * kChunks * kDescriptorStep64Rows,
                                    operand_descriptor(base + Shape::kAtB),
                                    scales + first_row<Shape>() + lane / 4,
                                    scales + Shape::kBlockM + 2 * (lane % 4),
                                    memory,
                                    lane < Shape::kCluster ? ring.template place_of_releases<Shape::kCluster>(lane)
                                                           : 0};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 64; ++i) tiles.acc[c][i] = 0.0f;
  }
  if (rounds_of<Shape>(experts_with_tokens(p.segments, lane) * p.tiles_each) > 0) {
    for (bool last = false; !last; tiles.next_tile()) {
      tiles.ring.wait_full(0);
      int left = tiles.place().groups / 2 - 1;
      tiles.template group<true>(0, left == 0);
      for (; left > 0; left -= kStages) {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
          if (i >= left) break;
          tiles.template group<false>((1 + i) % kStages, i + 1 >= left);
        }
      }
      last = tiles.place().groups % 2;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) tiles.store(c, tiles.place_before());
  }
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_grouped_wgrad(JETRL_GRID_CONSTANT sm90::TensorMap a_map, JETRL_GRID_CONSTANT sm90::TensorMap b_map,
                       JETRL_GRID_CONSTANT sm90::TensorMap a_scales_map,
                       JETRL_GRID_CONSTANT sm90::TensorMap b_scales_map, JETRL_GRID_CONSTANT GroupedWgradParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const TileRing<Shape::kStages> ring{base + Shape::kAtFull, base + Shape::kAtEmpty};
  const int thread = sm90::thread_index(), lane = thread % 32;
  const int warp = sm90::warp_uniform(thread / 32), warpgroup = warp / 4;
  const int rank = Shape::kCluster == 1 ? 0 : sm90::rank_in_cluster();

  if (thread == 0) {
    sm90::prefetch_tensor_map(&a_map);
    sm90::prefetch_tensor_map(&b_map);
    sm90::prefetch_tensor_map(&a_scales_map), sm90::prefetch_tensor_map(&b_scales_map);
    ring.template init<Shape::kCluster, 4 * Shape::kConsumers>(1);
    // The place before the first tile, whose number is even: no row of it is stored.
    *reinterpret_cast<Place*>(memory + Shape::kAtTiles + 16) = {0, 0, 0, 0};
  }
  sort_experts<Shape>(p.segments, memory, thread);
  sync_cluster_or_block<Shape::kCluster>();

  if (warpgroup == 0) {
    sm90::give_registers<24>();
    if (warp != 0) return;  // instead of waiting below until the kernel ends
    grouped_wgrad_copy<Shape>(&a_map, &b_map, &a_scales_map, &b_scales_map, p, memory, base, ring, rank, lane);
  } else {
    sm90::take_registers<240>();
    grouped_wgrad_consume<Shape>(p, memory, ring, warpgroup - 1, rank, warp % 4, lane);
  }
  // No block exits while another of its cluster may still arrive at its barriers.
  if (Shape::kCluster > 1) sm90::sync_cluster();
}

template <int kBlockM, int kCluster>
void run_grouped_wgrad(const Operand& a, const Operand& b, int t, const Segments& segments, const Output& dw,
                       Stream stream) {
  using Shape = GroupedWgradShape<kBlockM, kCluster>;
  const int tiles_m = ceil_div(a.rows, kBlockM), tiles_n = ceil_div(b.rows, kCluster * Shape::kBlockN);
  const int t_blocks = ceil_div(t, kGroup);
  const GroupedWgradParams p{dw, segments, a.rows, b.rows, tiles_m, tiles_m * tiles_n};
  const auto a_map = operand_map(a, t, kBlockM / kCluster);
  const auto b_map = operand_map(b, t, Shape::kBlockN);
  const auto a_scales_map = scales_map(a.scales, a.rows, t_blocks, kBlockM / kCluster);
  const auto b_scales_map = scales_map(b.scales, b.rows, t_blocks, Shape::kBlockN);
  const int clusters = std::min(segments.experts * p.tiles_each, multiprocessors() / kCluster);
  const Grid grid{clusters * kCluster, kCluster, Shape::kThreads, Shape::kBytes, stream};
  launch<sm90_grouped_wgrad<Shape>>(grid, a_map, b_map, a_scales_map, b_scales_map, p);
}

// Tiles of 128 rows halve the work but need more bytes per cycle, which costs about a tenth of the speed.
constexpr TileCost kTiles[] = {{256, 20}, {128, 11}};

}  // namespace

void grouped_wgrad(const Operand& a, const Operand& b, int t, const Segments& segments, const Output& dw, Config config,
                   Stream stream) {
  if (dw.fp32) refuse("grouped_wgrad writes BF16; pass an output of BF16");
  if (!scales_suit_tma(a.scales, a.rows) || !scales_suit_tma(b.scales, b.rows)) {
    refuse("grouped_wgrad: the scales of a group of tokens must lie side by side, groups on multiples of 16 bytes; use "
           "backend triton");
  }
  if (segments.experts > kMostExperts) {
    refuse("grouped_wgrad: more than " + std::to_string(kMostExperts) +
           " experts are not supported; use backend triton");
  }
  const int block = config.block ? config.block : choose_block(kTiles, a.rows, 1, 1);
  const int cluster = config.cluster ? config.cluster : ceil_div(b.rows, kGroup) % 2 == 0 ? 2 : 1;
  switch (block * 10 + cluster) {
    case 1281: return run_grouped_wgrad<128, 1>(a, b, t, segments, dw, stream);
    case 1282: return run_grouped_wgrad<128, 2>(a, b, t, segments, dw, stream);
    case 2561: return run_grouped_wgrad<256, 1>(a, b, t, segments, dw, stream);
    case 2562: return run_grouped_wgrad<256, 2>(a, b, t, segments, dw, stream);
    default:
      refuse("grouped_wgrad: tiles have 128 or 256 rows and clusters 1 or 2 blocks; leave them 0 for the kernel's "
             "choice");
  }
}

}  // namespace jetrl

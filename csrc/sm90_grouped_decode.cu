// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// FProp of a mixture's experts on Hopper for few rows per expert, with the bits of sm90_grouped_fprop.cu. Reading the
// weights of the experts that have rows, once, from device memory is the limit.
//
// A tile is up to 64 rows of one expert and kColumns rows of its W (decode.cuh, segments.cuh). A stage gets as many
// boxes of eight rows of X as the expert has; the rest of its rows keep old bytes, and their products are not stored.
// The ring continues from tile to tile, so W streams without a gap.
//
// Roles: a consumer warpgroup; a warp that finds tiles, copies qdata by TMA and passes a tile's place to the consumers
// with its first stage; a warp that finds tiles and copies scales by cp.async. With several slices of K, each a
// product, a tile is of one slice, k_blocks long.
//
// The previous kernel makes X. With `static_weight` alone it also makes the segments, and all warps wait for it. With
// `static_segments` the warps that read X wait, after copies of the first tile's W; consumers store once X has arrived.

#include <algorithm>
#include <cmath>

#include "decode.cuh"
#include "launch.h"
#include "segments.cuh"

namespace jetrl {

namespace {

constexpr int kBoxRows = 8, kFewRows = 32;  // up to kFewRows rows of X come in boxes of kBoxRows, more in one

struct GroupedDecodeParams {
  Scales x_scales, w_scales;
  Output y;
  Segments segments;
  int n, k_blocks, tiles_n;
  int w_row_step, w_column_step, w_columns;
  int64_t w_scale_step;
  int x_columns, slice_tiles_n, slice_rows;  // all of K; of tiles_n and of Y's rows those of one slice of K
  bool early;                                // the previous kernel writes neither W nor where segments lie
};

template <int kColumns>
struct GroupedDecodeShape : DecodeShape<64, kColumns, kColumns == 128 ? 1 : 2> {
  using Base = DecodeShape<64, kColumns, kColumns == 128 ? 1 : 2>;
  static constexpr int kAtTiles = round_up(Base::kBytes, 16);  // row, end, column of the tile that begins with a stage
  static constexpr int kBytes = kAtTiles + 16 * Base::kStages;

  static_assert(kBytes <= kSharedMemory, "the tiles' places do not fit into shared memory");
};

// The slice of K of a tile, whose tile_n becomes that among the slice's columns.
JETRL_DEVICE int take_slice(const GroupedDecodeParams& p, SegmentTile& at) {
  int slice = 0;
  for (; at.tile_n >= p.slice_tiles_n; at.tile_n -= p.slice_tiles_n) ++slice;
  return slice;
}

// By a whole warp.
template <class Shape>
JETRL_DEVICE void grouped_decode_copy(const sm90::TensorMap* x_map, const sm90::TensorMap* x_rows_map,
                                      const sm90::TensorMap* w_map, const GroupedDecodeParams& p, uint8_t* memory,
                                      StageRing ring, int lane) {
  const uint32_t base = sm90::shared_address(memory);
  SegmentTiles<Shape::kTokens> tiles{p.segments, p.tiles_n};
  SegmentTile at;
  bool waited = !p.early;
  for (int tile = first_tile<1>(); tiles.locate(tile, lane, at); tile += tile_step<1>()) {
    const int slice = take_slice(p, at), above = slice * p.slice_rows, first_block = slice * p.k_blocks;
    const int rows = at.end - at.row, column = at.tile_n * Shape::kColumns;
    const int boxes = rows > kFewRows ? 0 : ceil_div(rows, kBoxRows);
    const int bytes_x = boxes == 0 ? Shape::kTileX : boxes * kBoxRows * kGroup;
    // By one thread, for a free stage: announces all its bytes and copies W. X must follow.
    const auto load_w = [&](const StageRing& to, int block) {
      const uint32_t full = to.full_barrier();
      if (block == 0) {
        const int4 place = {above + at.row, above + at.end, column, 0};
        *reinterpret_cast<int4*>(memory + Shape::kAtTiles + 16 * to.stage) = place;
      }
      sm90::barrier_arrive_expect(full, Shape::kStageW + Shape::kBlocks * bytes_x);
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
        // The half of a stage past K must be zero, though another expert's or slice's K may follow in memory.
        const bool exists = block + b < p.k_blocks;
        sm90::tma_load(base + Shape::kAtW + to.stage * Shape::kStageW + b * Shape::kTileW, w_map,
                       exists ? at.expert * p.w_column_step + (first_block + block + b) * kGroup : p.w_columns,
                       at.expert * p.w_row_step + column, full);
      }
    };
    int early = 0;  // K blocks of W whose copies have started
    if (!waited) {
      StageRing to = ring;
      for (; early < p.k_blocks && early < Shape::kStages * Shape::kBlocks; early += Shape::kBlocks) {
        if (sm90::elect_one()) load_w(to, early);
        to.advance();
      }
      sm90::wait_for_previous_kernel();
      waited = true;
    }
    for (int block = 0; block < p.k_blocks; block += Shape::kBlocks) {
      if (block >= early) {
        ring.wait_empty();
        sm90::sync_warp();  // else a late lane may miss the phase
      }
      if (sm90::elect_one()) {
        if (block >= early) load_w(ring, block);
        const uint32_t full = ring.full_barrier();
#pragma unroll
        for (int b = 0; b < Shape::kBlocks; ++b) {
          const uint32_t to = base + ring.stage * Shape::kStageX + b * Shape::kTileX;
          const int from = block + b < p.k_blocks ? (first_block + block + b) * kGroup : p.x_columns;
          if (boxes == 0) sm90::tma_load(to, x_map, from, at.row, full);
#pragma unroll 1
          for (int i = 0; i < boxes; ++i) {
            sm90::tma_load(to + i * kBoxRows * kGroup, x_rows_map, from, at.row + i * kBoxRows, full);
          }
        }
      }
      ring.advance();
    }
  }
  if (!waited) sm90::wait_for_previous_kernel();  // no tile for this block
}

// By a warp: lane l copies scales l, l + 32, ... of the tokens of every stage; the first lanes also those of W.
template <class Shape>
JETRL_DEVICE void grouped_decode_scales(const GroupedDecodeParams& p, uint32_t base, StageRing ring, int lane) {
  constexpr int kBlocks = Shape::kBlocks, kEach = Shape::kTokens * kBlocks / 32, kTokensEach = 32 / kBlocks;
  const int half = lane % kBlocks, left = p.k_blocks - half;  // K blocks there are for this lane
  SegmentTiles<Shape::kTokens> tiles{p.segments, p.tiles_n};
  SegmentTile at;
  bool waited = !p.early;
  for (int tile = first_tile<1>(); tiles.locate(tile, lane, at); tile += tile_step<1>()) {
    if (!waited) sm90::wait_for_previous_kernel();  // W's scales wait with those of X: a few bytes per stage
    waited = true;
    const int first_block = take_slice(p, at) * p.k_blocks + half;
    const int row = at.row + lane / kBlocks, w_row = at.tile_n * Shape::kColumns / kGroup;
    const float* of_x = p.x_scales.data + row * p.x_scales.stride_row + first_block * p.x_scales.stride_group;
    const float* of_w = p.w_scales.data + at.expert * p.w_scale_step + w_row * p.w_scales.stride_row +
                        first_block * p.w_scales.stride_group;
    for (int block = 0; block < p.k_blocks; block += kBlocks) {
      ring.wait_empty();
      const uint32_t to = base + Shape::kAtScales + ring.stage * Shape::kStageScales + 4 * lane;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sm90::cp_async_f32(to + 128 * i, of_x + i * kTokensEach * p.x_scales.stride_row,
                           block < left && row + i * kTokensEach < at.end);
      }
      if (lane < kBlocks) sm90::cp_async_f32(to + 4 * Shape::kAtWScales, of_w, block < left);
      of_x += kBlocks * p.x_scales.stride_group;
      of_w += kBlocks * p.w_scales.stride_group;
      sm90::cp_async_arrive(ring.full_barrier());
      ring.advance();
    }
  }
}

template <class Shape>
JETRL_DEVICE void grouped_decode_consume(const GroupedDecodeParams& p, uint8_t* memory, StageRing ring, int warp,
                                         int lane) {
  constexpr int kSums = Shape::kColumns / 2;
  const int upper = 16 * warp + lane / 4;  // this thread's upper row in the tile
  DecodePart<Shape> part(memory, ring, 0, upper, lane);
  const int count = SegmentTiles<Shape::kTokens>{p.segments, p.tiles_n}.count(lane);
  for (int tile = first_tile<1>(); tile < count; tile += tile_step<1>()) {
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
    int4 place;
    const int first = part.next.stage;
    part.multiply(acc, p.k_blocks,
                  [&] { place = *reinterpret_cast<const int4*>(memory + Shape::kAtTiles + 16 * first); });
    store_fragments(acc, p.y, place.x + upper, place.y, place.z + 2 * (lane % 4), p.n);
  }
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_grouped_decode(JETRL_GRID_CONSTANT sm90::TensorMap x_map, JETRL_GRID_CONSTANT sm90::TensorMap x_rows_map,
                        JETRL_GRID_CONSTANT sm90::TensorMap w_map, JETRL_GRID_CONSTANT GroupedDecodeParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const StageRing ring{base + Shape::kAtFull, base + Shape::kAtEmpty, Shape::kStages};
  const int thread = sm90::thread_index(), lane = thread % 32, warp = sm90::warp_uniform(thread / 32);

  if (warp == Shape::kCopyWarp && lane == 0) {
    sm90::prefetch_tensor_map(&w_map);
    sm90::prefetch_tensor_map(&x_map);
    sm90::prefetch_tensor_map(&x_rows_map);
    ring.template init<1, 4 * Shape::kConsumers>();
  }
  sm90::sync_block();
  if (!p.early) sm90::wait_for_previous_kernel();
  if (warp < Shape::kCopyWarp) {
    grouped_decode_consume<Shape>(p, memory, ring, warp, lane);
  } else if (warp == Shape::kScaleWarp) {
    grouped_decode_scales<Shape>(p, base, ring, lane);
  } else {
    grouped_decode_copy<Shape>(&x_map, &x_rows_map, &w_map, p, memory, ring, lane);
  }
}

template <int kColumns>
void run_grouped_decode(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                        bool static_weight, bool static_segments, Stream stream) {
  using Shape = GroupedDecodeShape<kColumns>;
  const int slice_tiles_n = ceil_div(w.n, kColumns), tiles_n = slices * slice_tiles_n;
  const GroupedDecodeParams p{x.scales,      w.all.scales, y,              segments, w.n,          w.k / kGroup / slices,
                              tiles_n,       w.row_step,   w.column_step,  w.columns, w.scale_step, w.k,
                              slice_tiles_n, x.rows,        static_weight && static_segments};
  const auto x_map = operand_map(x, w.k, Shape::kTokens);
  const auto x_rows_map = operand_map(x, w.k, kBoxRows);
  const auto w_map = operand_map(w.all, w.columns, kColumns);
  const int64_t most = int64_t(most_row_tiles(x.rows, segments.experts, Shape::kTokens)) * tiles_n;
  const Grid grid{int(std::min<int64_t>(most, multiprocessors())), 1, Shape::kThreads, Shape::kBytes, stream,
                  static_weight};
  launch<sm90_grouped_decode<Shape>>(grid, x_map, x_rows_map, w_map, p);
}

constexpr int kColumnChoices[] = {128, 64, 32};

// The time of a tile's start and end in rows of W: at one token 96 tiles of 128 rows take less time than 384 of 32,
// though these are fewer rows per multiprocessor.
constexpr int kEnds = 12;

// The time of a tile's K block is its reads from L2: rows of W and boxes of X. Rows choose experts at random, so
// 1 - (1 - 1 / experts)^rows of the experts have rows.
int plan_cost(int columns, int rows, int experts, int n) {
  const int hit = std::ceil(experts * (1 - std::pow(1 - 1.0 / experts, rows)));
  const int tiles = hit * ceil_div(n, columns);
  return ceil_div(tiles, multiprocessors()) * (columns + round_up(ceil_div(rows, hit), kBoxRows) + kEnds);
}

}  // namespace

void grouped_decode(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                    Config config, bool static_weight, bool static_segments, Stream stream) {
  if (!has_slices(w.k, slices)) refuse("grouped_decode: a slice of K must be a multiple of 128; use fewer slices");
  int columns = config.block, least = 0;
  for (const int choice : kColumnChoices) {
    const int cost = plan_cost(choice, x.rows, segments.experts, slices * w.n);
    if (config.block == 0 && (least == 0 || cost < least)) columns = choice, least = cost;
  }
  switch (config.cluster > 1 ? -1 : columns) {
    case 32: return run_grouped_decode<32>(x, w, segments, slices, y, static_weight, static_segments, stream);
    case 64: return run_grouped_decode<64>(x, w, segments, slices, y, static_weight, static_segments, stream);
    case 128: return run_grouped_decode<128>(x, w, segments, slices, y, static_weight, static_segments, stream);
    default:
      refuse("grouped_decode: tiles have 32, 64 or 128 rows of W and blocks form no clusters; leave both 0 for the "
             "kernel's choice");
  }
}

}  // namespace jetrl

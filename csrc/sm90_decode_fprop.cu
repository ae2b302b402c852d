// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Decode GEMM on Hopper: Y[M,N] = X[M,K] W[N,K]^T (+ bias) for few rows of X, with the bits of
// sm90_fprop_1x128_128x128.cu. Reading the weights, once, from device memory is the limit.
//
// Tokens are wgmma's M and kColumns rows of W its N (decode.cuh); kColumns is chosen so that whole rounds of blocks
// cover N (plan_cost).
//
// Roles: one consumer warpgroup, two with 128 tokens; a warp that copies qdata by TMA; a warp that copies scales by
// cp.async. Reads of X wait for the previous kernel, which makes X; copies of W may start before (`static_weight`). The
// next kernel cannot start early: each block keeps a multiprocessor's shared memory to its end.

#include <algorithm>

#include "decode.cuh"
#include "launch.h"

namespace jetrl {

namespace {

constexpr int kMostTokens = 128;  // of a tile

struct DecodeParams {
  Scales x_scales, w_scales;
  Bias bias;
  Output y;
  int m, n, k_blocks;
  int tiles_m;  // tiles of tokens: tile t is tile t % tiles_m of tokens and t / tiles_m of W, so W stays in L2
  int tiles;
};

// The first token and the first column (row of W) of a tile.
template <class Shape>
JETRL_DEVICE void locate(const DecodeParams& p, int tile, int& token, int& column) {
  int tile_n = tile;
  token = 0;
  if (Shape::kTokens == kMostTokens && p.tiles_m != 1) {  // only this variant gets more rows than it has tokens
    tile_n = tile / p.tiles_m;
    token = (tile - tile_n * p.tiles_m) * Shape::kTokens;
  }
  column = tile_n * Shape::kColumns;
}

// By one thread.
template <class Shape>
struct DecodeCopies {
  const sm90::TensorMap *x_map, *w_map;
  uint32_t base;
  StageRing ring;

  // Announces all bytes of a stage and copies W. X must follow.
  JETRL_DEVICE void load_w(int stage, int k, int column) const {
    const uint32_t full = ring.full + 8 * stage;
    sm90::barrier_arrive_expect(full, Shape::kStageX + Shape::kStageW);
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      sm90::tma_load(base + Shape::kAtW + stage * Shape::kStageW + b * Shape::kTileW, w_map, k + b * kGroup, column,
                     full);
    }
  }

  JETRL_DEVICE void load_x(int stage, int k, int token) const {
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      sm90::tma_load(base + stage * Shape::kStageX + b * Shape::kTileX, x_map, k + b * kGroup, token,
                     ring.full + 8 * stage);
    }
  }

  // The first stages, which wait for no thread of this block: W at once, X after the previous kernel, which may write
  // it.
  JETRL_DEVICE void start(const DecodeParams& p) const {
    int token, column;
    locate<Shape>(p, first_tile<1>(), token, column);
    const int in_tile = ceil_div(p.k_blocks, Shape::kBlocks);
    const int stages = Shape::kEarly < in_tile ? Shape::kEarly : in_tile;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) load_w(stage, stage * Shape::kBlocks * kGroup, column);
    sm90::wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) load_x(stage, stage * Shape::kBlocks * kGroup, token);
  }

  JETRL_DEVICE void run(const DecodeParams& p) {
    int early = Shape::kEarly;  // stages that `start` began, if the first tile has as many
    for (int tile = first_tile<1>(); tile < p.tiles; tile += tile_step<1>()) {
      int token, column;
      locate<Shape>(p, tile, token, column);
      for (int block = 0; block < p.k_blocks; block += Shape::kBlocks) {
        if (early-- <= 0) {
          ring.wait_empty();
          load_w(ring.stage, block * kGroup, column);
          load_x(ring.stage, block * kGroup, token);
        }
        ring.advance();
      }
      early = 0;
    }
  }
};

// By a warp: lane l copies scales l, l + 32, ... of the tokens of every stage; the first lanes also those of W. It
// syncs with the block after its first copies, which need no barrier.
template <class Shape>
JETRL_DEVICE void decode_scales(const DecodeParams& p, uint32_t base, StageRing ring, int lane) {
  constexpr int kBlocks = Shape::kBlocks, kEach = Shape::kTokens * kBlocks / 32, kTokensEach = 32 / kBlocks;
  const int half = lane % kBlocks, left = p.k_blocks - half;  // K blocks there are for this lane
  bool met = false;
  sm90::wait_for_previous_kernel();  // W's scales wait with those of X: a few bytes per stage
  for (int tile = first_tile<1>(); tile < p.tiles; tile += tile_step<1>()) {
    int token, column;
    locate<Shape>(p, tile, token, column);
    const int row = token + lane / kBlocks, w_row = column / kGroup + lane / kBlocks;
    const float* of_x = p.x_scales.data + row * p.x_scales.stride_row + half * p.x_scales.stride_group;
    const float* of_w = p.w_scales.data + w_row * p.w_scales.stride_row + half * p.w_scales.stride_group;
    const bool w_exists = w_row < ceil_div(p.n, kGroup);
    for (int block = 0; block < p.k_blocks; block += kBlocks) {
      if (met) ring.wait_empty();
      const uint32_t to = base + Shape::kAtScales + ring.stage * Shape::kStageScales + 4 * lane;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sm90::cp_async_f32(to + 128 * i, of_x + i * kTokensEach * p.x_scales.stride_row,
                           block < left && row + i * kTokensEach < p.m);
      }
      if (lane < 2 * kBlocks) sm90::cp_async_f32(to + 4 * Shape::kAtWScales, of_w, block < left && w_exists);
      of_x += kBlocks * p.x_scales.stride_group;
      of_w += kBlocks * p.w_scales.stride_group;
      if (!met) sm90::sync_block();
      met = true;
      sm90::cp_async_arrive(ring.full_barrier());
      ring.advance();
    }
  }
}

// All values are loaded before the first is used; columns past the last read the last two and are not stored.
template <int kSums>
JETRL_DEVICE void add_bias(float (&acc)[kSums], const Bias& bias, int column, int columns) {
  float values[kSums / 4][2];
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const int at = column + 8 * j < columns ? column + 8 * j : columns - 2;
    values[j][0] = load_bias(bias, at), values[j][1] = load_bias(bias, at + 1);
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) acc[i] = sm90::add(acc[i], values[i / 4][i % 2]);
}

template <class Shape>
JETRL_DEVICE void decode_consume(const DecodeParams& p, uint8_t* memory, StageRing ring, int consumer,
                                 int warp, int lane) {
  constexpr int kBlocks = Shape::kBlocks, kSums = Shape::kColumns / 2;
  const int upper = 64 * consumer + 16 * warp + lane / 4;  // this thread's upper row in the tile
  const float* scales = reinterpret_cast<const float*>(memory + Shape::kAtScales);
  DecodePart<Shape> part(memory, ring, consumer, upper, lane);
  for (int tile = first_tile<1>(); tile < p.tiles; tile += tile_step<1>()) {
    int token, first;
    locate<Shape>(p, tile, token, first);
#pragma unroll
    for (int g = 0; g < Shape::kScaleGroups; ++g) {
      const bool second = (first + 16 * g) / kGroup > first / kGroup;
      part.w_scales[g] = scales + Shape::kAtWScales + (Shape::kScaleGroups > 1 && second ? kBlocks : 0);
    }
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;

    part.multiply(acc, p.k_blocks, [] {});

    const int row = token + upper, column = first + 2 * (lane % 4);
    if (p.bias.data != nullptr) add_bias(acc, p.bias, column, p.n);
    store_fragments(acc, p.y, row, p.m, column, p.n);
  }
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_decode_fprop(JETRL_GRID_CONSTANT sm90::TensorMap x_map, JETRL_GRID_CONSTANT sm90::TensorMap w_map,
                      JETRL_GRID_CONSTANT DecodeParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const StageRing ring{base + Shape::kAtFull, base + Shape::kAtEmpty, Shape::kStages};
  const int thread = sm90::thread_index(), lane = thread % 32, warp = sm90::warp_uniform(thread / 32);
  DecodeCopies<Shape> copies{&x_map, &w_map, base, ring};

  // In this order the compiler puts the copying thread's code right after the entry and the consumers' last.
  if (warp < Shape::kCopyWarp) {
    sm90::sync_block();
    decode_consume<Shape>(p, memory, ring, warp / 4, warp % 4, lane);
  } else if (warp == Shape::kScaleWarp) {
    decode_scales<Shape>(p, base, ring, lane);
  } else {
    if (lane == 0) {
      sm90::prefetch_tensor_map(&w_map);
      sm90::prefetch_tensor_map(&x_map);
      ring.template init<1, 4 * Shape::kConsumers>();
      copies.start(p);
    }
    sm90::sync_warp();
    sm90::sync_block();
    if (lane == 0) copies.run(p);
  }
}

constexpr int kColumnChoices[] = {16, 32, 48, 64};

// The time of a tile's K block is its reads from L2, in rows of W and tokens; the start and end of a round add a few.
constexpr int plan_cost(int tokens, int columns, int blocks, int m, int n) {
  const int tiles = ceil_div(m, tokens) * ceil_div(n, columns);
  return ceil_div(tiles, blocks) * (columns + (m < tokens ? m : tokens) + 4);
}

// The arguments of a call.
struct DecodeCall {
  const Operand &x, &w;
  int k;
  const Bias& bias;
  const Output& y;
  bool static_weight;
  Stream stream;
};

template <class Shape>
void run_decode(const DecodeCall& call) {
  const int tiles_m = ceil_div(call.x.rows, Shape::kTokens);
  const int tiles = tiles_m * ceil_div(call.w.rows, Shape::kColumns);
  const DecodeParams p{call.x.scales, call.w.scales, call.bias, call.y, call.x.rows, call.w.rows,
                       ceil_div(call.k, kGroup), tiles_m, tiles};
  const auto x_map = operand_map(call.x, call.k, Shape::kTokens);
  const auto w_map = operand_map(call.w, call.k, Shape::kColumns);
  const Grid grid{std::min(tiles, multiprocessors()), 1, Shape::kThreads, Shape::kBytes, call.stream,
                  call.static_weight};
  launch<sm90_decode_fprop<Shape>>(grid, x_map, w_map, p);
}

template <int kTokens>
void plan_and_run(const DecodeCall& call, Config config) {
  int columns = config.block, least = 0;
  for (const int choice : kColumnChoices) {
    const int cost = plan_cost(kTokens, choice, multiprocessors(), call.x.rows, call.w.rows);
    if (config.block == 0 && (least == 0 || cost < least)) columns = choice, least = cost;
  }
  switch (config.cluster > 1 ? -1 : columns) {
    case 16: return run_decode<DecodeShape<kTokens, 16>>(call);
    case 32: return run_decode<DecodeShape<kTokens, 32>>(call);
    case 48: return run_decode<DecodeShape<kTokens, 48>>(call);
    case 64: return run_decode<DecodeShape<kTokens, 64>>(call);
    default:
      refuse("decode_fprop: tiles have 16, 32, 48 or 64 rows of W and blocks form no clusters; leave both 0 for the "
             "kernel's choice");
  }
}

}  // namespace

void decode_fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config,
                  bool static_weight, Stream stream) {
  const DecodeCall call{x, w, k, bias, y, static_weight, stream};
  if (x.rows <= 16) {
    plan_and_run<16>(call, config);
  } else if (x.rows <= 32) {
    plan_and_run<32>(call, config);
  } else if (x.rows <= 64) {
    plan_and_run<64>(call, config);
  } else {
    plan_and_run<kMostTokens>(call, config);
  }
}

}  // namespace jetrl

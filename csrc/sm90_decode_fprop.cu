// Copyright 2026 The jetrl_verl Authors
//
// Licensed under the Apache License, Version 2.0 (the "License");
// you may not use this file except in compliance with the License.
// You may obtain a copy of the License at
//
//     http://www.apache.org/licenses/LICENSE-2.0
//
// Unless required by applicable law or agreed to in writing, software
// distributed under the License is distributed on an "AS IS" BASIS,
// WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
// See the License for the specific language governing permissions and
// limitations under the License.

// Decoding on Hopper: Y[M,N] = X[M,K] W[N,K]^T (+ bias) for few rows of X, with the bits of the big kernel
// (sm90_fprop_1x128_128x128.cu). The weights are read once from device memory and are what limits it: 4.3 TB/s.
//
// Sides swapped. wgmma's M is at least 64 and its N at least 8, so rows of W are its M and tokens its N: D = W X^T, the
// tile's transpose. A dot product of 32 codes does not know which factor was called A (tests on a GPU hold that), the
// chain of four per K block starts from zero, and the promotion is the same fma(p, s_x * s_w, acc), K blocks ascending,
// with no split of K: so a row of Y has the same bits here and there.
//
// All multiprocessors stream. One block takes kRows rows of W, chosen so that one round of blocks, or a whole number of
// rounds, covers N: 4096 = 128 x 32, 6144 = 128 x 48, 24576 = 2 x 128 x 96. wgmma's 64 rows may reach past the tile's:
// what it reads there is other data of this block's shared memory, rows of D are independent, and those are not stored.
//
// What limits it, per multiprocessor. A K block of 32 rows is 4 KB of W, due every 220 cycles.
//   - Latency. A warpgroup waits for a copy, issues four wgmma, waits for them, promotes: one after the other, that is
//     400 cycles. So a step is a stage of two K blocks (one with 128 tokens, whose X would leave too few stages), and
//     the wgmma of stage i + 1 are issued before those of stage i are waited for: four sets of partial sums.
//   - Issue slots: 64 tokens are 32 FMA and 16 multiplications a K block for each of four warps on four sub-cores.
//   - The L2 delivers 41 bytes per ns and multiprocessor, and X comes from there once per block: 64 tokens are 8 KB
//     beside 4 KB of W, three times the memory's rate. Blocks of a cluster take neighbouring tiles of N and share X by
//     multicast: with four, 6 KB of L2 reads for 4 KB of W. plan_cost weighs this.
//   - Bytes in flight: at 33 bytes per ns and about 1 us under load, 33 KB of W have to be on their way. Stages fill
//     the shared memory; two are in the consumers' hands, 48 KB and more are left (32 at 128 tokens by 32 rows).
//   - Code is read for the first time, too. A tile of K = 4096 is 16 stages, so a loop that is unrolled over the ring
//     would run cold from one end to the other, 3 KB a stage at 64 tokens. Two stages, what the two pairs of partial
//     sums need, are resident after the first round; descriptors are a base plus one shifted stage.
//
// Fixed cost: launch; a tensor map fetched and the first copy, one after the other; the last stage and the stores. The
// producer therefore starts its first copies (kEarly stages of them) before the block or cluster meets: its own
// barriers are all they need. Only shared tiles have to wait for the other blocks.
//
// Roles: warpgroups of consumers, each 64 rows (kRows = 96: two) by up to 64 tokens (kTokens = 128: two); a warp of
// which one thread starts the copies of tiles; a warp that copies scales by cp.async.
//
// Edges. TMA and cp.async fill with zeros. An odd number of K blocks leaves half a stage past K: partial sums p = +0,
// and the scale is made -0, since fma(+0, -0, acc) = acc + -0 = acc, bit for bit; +0 would turn an acc of -0 into +0.
//
// Scales: thread t's columns of D are tokens 8j + 2 (t % 4) + 0..1, its rows W's. Tiles start on multiples of 16 rows
// and a warp has 16 of them, so a warp's rows are in one block of 128, if not all warps' in the same. Y is D
// transposed: movmatrix turns an 8x8 block of BF16 in registers, after which four lanes hold 16 contiguous bytes of a
// row of Y.

#include <algorithm>

#include "epilogue.cuh"
#include "launch.h"
#include "pipeline.cuh"
#include "tile_ring.cuh"

namespace jetrl {

namespace {

constexpr int kSpare = 1024;  // bytes of shared memory that a block leaves to the system

struct DecodeParams {
  Scales x_scales, w_scales;
  Bias bias;
  Output y;
  int m, n, k_blocks;
  int tiles_m;  // tiles of tokens: cluster tile t is tile t % tiles_m of tokens and t / tiles_m of W, so W stays in L2
  int tiles;    // of clusters
};

template <int kTokens_, int kRows_, int kCluster_>
struct DecodeShape {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kCluster = kCluster_;
  static constexpr int kRowParts = ceil_div(kRows, 64), kTokenParts = ceil_div(kTokens, 64);
  static constexpr int kConsumers = kRowParts * kTokenParts, kColumns = kTokens / kTokenParts;  // of a warpgroup's D
  static constexpr int kCopyWarp = 4 * kConsumers, kScaleWarp = kCopyWarp + 1;
  // With two consumer warpgroups a third one, mostly idle, whose registers they take.
  static constexpr int kThreads = kConsumers == 2 ? 384 : 192;
  static constexpr int kBlocks = kTokens > 64 ? 1 : 2;  // of K, per stage
  static constexpr int kTileW = kRows * kGroup, kTileX = kTokens * kGroup;
  static constexpr int kStageW = kBlocks * kTileW, kStageX = kBlocks * kTileX;
  // Scales of a stage: per K block the tokens', then per K block two blocks of W.
  static constexpr int kScales = kBlocks * (kTokens + 2), kAtWScales = kBlocks * kTokens;
  static constexpr int kStageScales = 4 * round_up(kScales, 4);
  static constexpr int kFit = (kSharedMemory - kSpare) / (kStageW + kStageX + kStageScales + 16);
  static constexpr int kStages = (kFit < 32 ? kFit : 32) / 2 * 2;
  static constexpr int kEarly = ceil_div(32768, kStageW) < kStages ? ceil_div(32768, kStageW) : kStages;
  // Byte offsets in shared memory.
  static constexpr int kAtX = kStages * kStageW;
  static constexpr int kAtScales = kAtX + kStages * kStageX;
  static constexpr int kAtFull = kAtScales + kStages * kStageScales;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kBytes = kAtEmpty + 8 * kStages;

  static_assert(kRows % 16 == 0, "the rows of a warp share a scale");
  static_assert(kTokens % (8 * kCluster) == 0, "each block of a cluster loads whole swizzle atoms of X");
  static_assert(kConsumers <= 2, "registers of two consumer warpgroups");
  static_assert(kStages % 2 == 0 && kStages >= 4, "stages take turns at two sets of partial sums");
  static_assert(kStages * kStageX >= 64 * kGroup, "wgmma reads 64 rows from the last tile of W on");
  static_assert(kBytes <= kSharedMemory - kSpare, "the stages do not fit into shared memory");
};

// The first token and, for this block of the cluster, the first row of W of a tile.
template <class Shape>
JETRL_DEVICE void locate(const DecodeParams& p, int tile, int rank, int& token, int& row) {
  int tile_n = tile;
  token = 0;
  if (p.tiles_m != 1) {
    tile_n = tile / p.tiles_m;
    token = (tile - tile_n * p.tiles_m) * Shape::kTokens;
  }
  row = (tile_n * Shape::kCluster + rank) * Shape::kRows;
}

// By one thread. Without a cluster both operands of the first stages may start before the block meets, with one W's.
template <class Shape>
struct DecodeCopies {
  const sm90::TensorMap *x_map, *w_map;
  uint32_t base;
  TileRing<Shape::kStages> ring;
  int rank;

  JETRL_DEVICE void load_w(int stage, int column, int row) const {
    const uint32_t full = ring.full_barrier(stage);
    sm90::barrier_arrive_expect(full, Shape::kStageW + Shape::kStageX);
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      sm90::tma_load(base + stage * Shape::kStageW + b * Shape::kTileW, w_map, column + b * kGroup, row, full);
    }
  }

  JETRL_DEVICE void load_x(int stage, int column, int token) const {
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      load_shared_tile<Shape::kTokens, Shape::kCluster>(base + Shape::kAtX + stage * Shape::kStageX + b * Shape::kTileX,
                                                        x_map, column + b * kGroup, token, rank,
                                                        ring.full_barrier(stage));
    }
  }

  JETRL_DEVICE void start(const DecodeParams& p) const {
    int token, row;
    locate<Shape>(p, first_tile<Shape::kCluster>(), rank, token, row);
#pragma unroll 1
    for (int stage = 0; stage < Shape::kEarly && stage * Shape::kBlocks < p.k_blocks; ++stage) {
      load_w(stage, stage * Shape::kBlocks * kGroup, row);
      if (Shape::kCluster == 1) load_x(stage, stage * Shape::kBlocks * kGroup, token);
    }
  }

  JETRL_DEVICE void run(const DecodeParams& p) {
    int early = Shape::kEarly;  // stages that `start` began, if the first tile has so many
    for (int tile = first_tile<Shape::kCluster>(); tile < p.tiles; tile += tile_step<Shape::kCluster>()) {
      int token, row, stage = 0;
      locate<Shape>(p, tile, rank, token, row);
      for (int block = 0; block < p.k_blocks; block += Shape::kBlocks) {
        const bool begun = early > 0;
        if (!begun) {
          ring.wait_empty(stage);
          load_w(stage, block * kGroup, row);
        }
        if (!begun || Shape::kCluster > 1) load_x(stage, block * kGroup, token);
        --early;
        ring.used(stage);
        stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      }
      early = 0;
    }
  }
};

// By a warp: lane l copies scales l, l + 32, ... of every stage.
template <class Shape>
JETRL_DEVICE void decode_scales(const DecodeParams& p, uint32_t base, TileRing<Shape::kStages> ring, int rank,
                                int lane) {
  constexpr int kTokens = Shape::kTokens, kEach = ceil_div(Shape::kScales, 32);
  for (int tile = first_tile<Shape::kCluster>(); tile < p.tiles; tile += tile_step<Shape::kCluster>()) {
    int token, row, stage = 0;
    locate<Shape>(p, tile, rank, token, row);
    const float* from[kEach];
    int64_t step[kEach];
    int end[kEach];  // the first K block for which there is none
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int entry = 32 * i + lane, of_w = entry - Shape::kAtWScales;
      const bool is_x = of_w < 0;
      const Scales& scales = is_x ? p.x_scales : p.w_scales;
      const int half = is_x ? entry / kTokens : of_w / 2;
      const int r = is_x ? token + entry % kTokens : row / kGroup + of_w % 2;
      from[i] = scales.data + r * scales.stride_row + half * scales.stride_group;
      step[i] = Shape::kBlocks * scales.stride_group;
      end[i] = r < (is_x ? p.m : ceil_div(p.n, kGroup)) ? p.k_blocks - half : 0;
    }
    for (int block = 0; block < p.k_blocks; block += Shape::kBlocks) {
      ring.wait_empty(stage);
      const uint32_t to = base + Shape::kAtScales + stage * Shape::kStageScales + 4 * lane;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (32 * (i + 1) <= Shape::kScales || 32 * i + lane < Shape::kScales) {
          sm90::cp_async_f32(to + 128 * i, from[i], block < end[i]);
        }
        from[i] += step[i];
      }
      sm90::cp_async_arrive(ring.full_barrier(stage));
      ring.used(stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
  }
}

// What a consumer warpgroup needs to start a stage's chains and to promote them.
template <class Shape>
struct DecodePart {
  static constexpr int kBlocks = Shape::kBlocks, kColumns = Shape::kColumns, kSums = kColumns / 2;
  static constexpr int kFloats = Shape::kStageScales / 4;

  TileRing<Shape::kStages> ring;
  uint32_t w, x;  // low words of the descriptors of this warpgroup's rows and tokens in stage 0
  uint32_t high;  // and the high word of them all
  const float *w_scales, *x_scales;  // of this thread in stage 0
  int lane;

  JETRL_DEVICE uint64_t descriptor(uint32_t low) const { return uint64_t(high) << 32 | low; }

  JETRL_DEVICE void start(float (&sums)[kBlocks][kSums], uint32_t stage) {
    const uint32_t at_w = w + stage * (Shape::kStageW / 16), at_x = x + stage * (Shape::kStageX / 16);
    ring.wait_full(stage);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      issue_chain<kColumns>(sums[b], descriptor(at_w + b * (Shape::kTileW / 16)),
                            descriptor(at_x + b * (Shape::kTileX / 16)));
    }
    ring.used(stage);
  }

  // s_x * s_w for this thread's tokens in a stage of which `left` K blocks exist.
  JETRL_DEVICE void read(float (&scale)[kBlocks][kColumns / 4], uint32_t stage, int left) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float w_scale = w_scales[stage * kFloats + 2 * b];
      if (b == 1 && left == 1) w_scale = -0.0f;  // the half past K
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(x_scales + stage * kFloats + b * Shape::kTokens + 8 * j);
        scale[b][2 * j] = sm90::multiply(pair.x, w_scale), scale[b][2 * j + 1] = sm90::multiply(pair.y, w_scale);
      }
    }
  }

  // Promotes a stage while kYounger younger stages' chains go on.
  template <int kYounger>
  JETRL_DEVICE void finish(float (&acc)[kSums], float (&sums)[kBlocks][kSums],
                           const float (&scale)[kBlocks][kColumns / 4], int stage) {
    constexpr int kPending = kYounger * kBlocks;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b == kBlocks - 1) {
        sm90::wgmma_wait<kPending>(sums[b]);
        ring.template release<Shape::kCluster>(stage, lane);
      } else {
        sm90::wgmma_wait<kPending + kBlocks - 1>(sums[b]);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = sm90::multiply_add(sums[b][i], scale[b][i / 4 * 2 + i % 2], acc[i]);
    }
  }
};

template <class Shape>
JETRL_DEVICE void decode_consume(const DecodeParams& p, uint8_t* memory, TileRing<Shape::kStages> ring, int consumer,
                                 int rank, int warp, int lane) {
  constexpr int kBlocks = Shape::kBlocks, kColumns = Shape::kColumns, kSums = kColumns / 2;
  const int row_part = consumer % Shape::kRowParts, token_part = consumer / Shape::kRowParts;
  const int warp_row = 64 * row_part + 16 * warp, first_token = token_part * kColumns;
  const uint32_t base = sm90::shared_address(memory);
  const float* scales = reinterpret_cast<const float*>(memory + Shape::kAtScales);
  DecodePart<Shape> part{ring};
  const uint64_t w_descriptor = operand_descriptor(base), x_descriptor = operand_descriptor(base + Shape::kAtX);
  part.w = uint32_t(w_descriptor) + row_part * uint32_t(kDescriptorStep64Rows);
  part.x = uint32_t(x_descriptor) + token_part * (kColumns * kGroup / 16);
  part.high = uint32_t(w_descriptor >> 32);
  part.x_scales = scales + first_token + 2 * (lane % 4);
  part.lane = lane;

  float even[kBlocks][kSums], odd[kBlocks][kSums];
  for (int tile = first_tile<Shape::kCluster>(); tile < p.tiles; tile += tile_step<Shape::kCluster>()) {
    int token, first;
    locate<Shape>(p, tile, rank, token, first);
    const int upper = first + warp_row + lane / 4, lower = upper + 8;
    // Rows past the tile's may lie past its second block, too; they are not stored, any scale serves.
    part.w_scales = scales + Shape::kAtWScales + ((first + warp_row) / kGroup > first / kGroup);
    float bias_upper = 0.0f, bias_lower = 0.0f;
    if (p.bias.data != nullptr) {
      if (upper < p.n) bias_upper = load_bias(p.bias, upper);
      if (lower < p.n) bias_lower = load_bias(p.bias, lower);
    }
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;

    // Two stages in flight, each way out of the loop with its own waits: chains whose end is behind another branch than
    // their start, or which nobody reads, are what the compiler serialises.
    int at = 0, left = p.k_blocks;
    float scale[kBlocks][kColumns / 4];
    part.start(even, 0);
    for (; left > 2 * kBlocks; left -= 2 * kBlocks) {
      const int next = at + 2 == Shape::kStages ? 0 : at + 2;
      part.read(scale, at, kBlocks);
      part.start(odd, at + 1);
      part.template finish<1>(acc, even, scale, at);
      part.read(scale, at + 1, kBlocks);
      part.start(even, next);
      part.template finish<1>(acc, odd, scale, at + 1);
      at = next;
    }
    if (left > kBlocks) {
      part.read(scale, at, kBlocks);
      part.start(odd, at + 1);
      part.template finish<1>(acc, even, scale, at);
      part.read(scale, at + 1, left - kBlocks);
      part.template finish<0>(acc, odd, scale, at + 1);
    } else {
      part.read(scale, at, left);
      part.template finish<0>(acc, even, scale, at);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bias = half == 0 ? bias_upper : bias_lower;
      const int eight = warp_row + 8 * half, column = first + eight + 2 * (lane % 4);
      const bool stored = eight < Shape::kRows && column < p.n;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        float low = acc[4 * j + 2 * half], high = acc[4 * j + 2 * half + 1];
        if (p.bias.data != nullptr) low = sm90::add(low, bias), high = sm90::add(high, bias);
        const uint32_t pair = sm90::transpose_8x8(sm90::pack_bf16(low, high));
        const int row = token + first_token + 8 * j + lane / 4;
        if (stored && row < p.m) {
          uint16_t* to = static_cast<uint16_t*>(p.y.data) + row * p.y.row_stride + column;
          *reinterpret_cast<uint32_t*>(to) = pair;
        }
      }
    }
  }
}

template <class Shape>
JETRL_KERNEL void __launch_bounds__(Shape::kThreads, 1)
    sm90_decode_fprop(JETRL_GRID_CONSTANT sm90::TensorMap x_map, JETRL_GRID_CONSTANT sm90::TensorMap w_map,
                      JETRL_GRID_CONSTANT DecodeParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  const uint32_t base = sm90::shared_address(memory);
  const TileRing<Shape::kStages> ring{base + Shape::kAtFull, base + Shape::kAtEmpty};
  const int thread = sm90::thread_index(), lane = thread % 32, warp = sm90::warp_uniform(thread / 32);
  const int rank = Shape::kCluster == 1 ? 0 : sm90::rank_in_cluster();
  DecodeCopies<Shape> copies{&x_map, &w_map, base, ring, rank};

  if (warp == Shape::kCopyWarp) {
    if (lane == 0) {
      sm90::prefetch_tensor_map(&w_map);
      sm90::prefetch_tensor_map(&x_map);
      ring.template init<Shape::kCluster, 4 * Shape::kConsumers>();
      copies.start(p);
    }
    sm90::sync_warp();
  }
  sync_cluster_or_block<Shape::kCluster>();

  if (warp < Shape::kCopyWarp) {
    if (Shape::kConsumers == 2) sm90::take_registers<224>();
    decode_consume<Shape>(p, memory, ring, warp / 4, rank, warp % 4, lane);
  } else {
    if (Shape::kConsumers == 2) sm90::give_registers<56>();
    if (warp == Shape::kScaleWarp) decode_scales<Shape>(p, base, ring, rank, lane);
    if (warp == Shape::kCopyWarp && lane == 0) copies.run(p);
  }
  // No block leaves while another of its cluster may still arrive at its barriers.
  if (Shape::kCluster > 1) sm90::sync_cluster();
}

// What a call is: X, W and so on, and how it is cut.
struct DecodeCall {
  const Operand &x, &w;
  int k;
  const Bias& bias;
  const Output& y;
  Stream stream;
};

struct DecodePlan {
  int rows = 0, cluster = 0, blocks = 0;  // blocks: how many run at once
  int cost = 0;
};

constexpr int kRowChoices[] = {16, 32, 48, 64, 96};
constexpr int kMostRows(int tokens) { return tokens > 64 ? 64 : 96; }

// The time of a tile's K block is what it reads from the L2, W's rows and the cluster's share of the tokens', in rows;
// a round has a beginning and an end worth a few more, and blocks that wait for each other cost something.
constexpr int plan_cost(int tokens, int rows, int cluster, int blocks, int m, int n) {
  const int tiles = ceil_div(m, tokens) * ceil_div(n, rows * cluster), rounds = ceil_div(tiles, blocks / cluster);
  const int together = cluster == 1 ? 0 : cluster == 2 ? 8 : 16;
  return rounds * (rows + tokens / cluster + together + 4);
}

template <class Shape>
void run_decode(const DecodeCall& call, int blocks) {
  const int tiles_m = ceil_div(call.x.rows, Shape::kTokens);
  const int tiles = tiles_m * ceil_div(call.w.rows, Shape::kRows * Shape::kCluster);
  const DecodeParams p{call.x.scales, call.w.scales, call.bias,                 call.y,  call.x.rows,
                       call.w.rows,   ceil_div(call.k, kGroup), tiles_m, tiles};
  const auto x_map = operand_map(call.x, call.k, Shape::kTokens / Shape::kCluster);
  const auto w_map = operand_map(call.w, call.k, Shape::kRows);
  const int clusters = std::min(tiles, blocks / Shape::kCluster);
  launch<sm90_decode_fprop<Shape>>(clusters * Shape::kCluster, Shape::kCluster, Shape::kThreads, Shape::kBytes,
                                   call.stream, x_map, w_map, p);
}

template <int kTokens, int kCluster>
void weigh(const DecodeCall& call, Config config, DecodePlan& best) {
  if (config.cluster != 0 && config.cluster != kCluster) return;
  using Any = DecodeShape<kTokens, 64, kCluster>;
  const int blocks = resident_blocks<sm90_decode_fprop<Any>>(kCluster, Any::kThreads, Any::kBytes);
  for (const int rows : kRowChoices) {
    if (rows > kMostRows(kTokens) || (config.block_m != 0 && config.block_m != rows)) continue;
    const int cost = plan_cost(kTokens, rows, kCluster, blocks, call.x.rows, call.w.rows);
    if (best.rows == 0 || cost < best.cost) best = {rows, kCluster, blocks, cost};
  }
}

template <int kTokens, int kCluster>
void run_if(const DecodeCall& call, const DecodePlan& plan) {
  if (plan.cluster != kCluster) return;
  switch (plan.rows) {
    case 16: return run_decode<DecodeShape<kTokens, 16, kCluster>>(call, plan.blocks);
    case 32: return run_decode<DecodeShape<kTokens, 32, kCluster>>(call, plan.blocks);
    case 48: return run_decode<DecodeShape<kTokens, 48, kCluster>>(call, plan.blocks);
    case 64: return run_decode<DecodeShape<kTokens, 64, kCluster>>(call, plan.blocks);
  }
  if constexpr (kMostRows(kTokens) == 96) run_decode<DecodeShape<kTokens, 96, kCluster>>(call, plan.blocks);
}

template <int kTokens, int... kClusters>
void plan_and_run(const DecodeCall& call, Config config) {
  DecodePlan plan;
  (weigh<kTokens, kClusters>(call, config, plan), ...);
  if (plan.rows == 0) {
    refuse("decode_fprop: no kernel for " + std::to_string(kTokens) + " tokens, tiles of " +
           std::to_string(config.block_m) + " rows of W (16, 32, 48, 64 and up to 64 tokens 96) and clusters of " +
           std::to_string(config.cluster) + "; leave them 0 for the kernel's choice");
  }
  (run_if<kTokens, kClusters>(call, plan), ...);
}

}  // namespace

void decode_fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config,
                  Stream stream) {
  const DecodeCall call{x, w, k, bias, y, stream};
  if (x.rows <= 8) {
    plan_and_run<8, 1>(call, config);
  } else if (x.rows <= 16) {
    plan_and_run<16, 1, 2>(call, config);
  } else if (x.rows <= 32) {
    plan_and_run<32, 1, 2>(call, config);
  } else if (x.rows <= 64) {
    plan_and_run<64, 1, 2, 4>(call, config);
  } else {
    plan_and_run<128, 1, 4>(call, config);
  }
}

}  // namespace jetrl

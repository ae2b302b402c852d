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
// All multiprocessors stream. One block takes `rows` rows of W, any multiple of 8 (one swizzle atom) up to 128, chosen
// so that one round of blocks, or a whole number of rounds, covers N: 4096 = 128 x 32, 6144 = 128 x 48. wgmma's 64 rows
// may reach past the tile's: what it reads there is other data of this block's shared memory, rows of D are
// independent, and those are not stored.
//
// Bytes in flight. At 4.3 TB/s and about 1 us under load, 33 KB a multiprocessor have to be on their way. Stages hold
// one K block and fill the shared memory: 18 of 12 KB for rows = 32 and 64 tokens.
//
// X is read from the L2 once per block: 64 tokens are 8 KB beside 4 KB of W, three times the memory's rate. Blocks of a
// cluster take neighbouring tiles of N and share X by multicast: with four, 6 KB of L2 reads for 4 KB of W.
//
// One warpgroup per 64 rows must keep up alone: a K block of rows = 32 is due every 220 cycles, a chain of 64 tokens
// takes 128 plus latency, and promotion 32 FMA + 32 multiplications. So the partial sums are double-buffered: chain i +
// 1 runs while sum i is promoted, in order.
//
// Scales: thread t's columns of D are tokens 8j + 2 (t % 4) + 0..1, its rows are W's, so s_w is per row (a tile may
// straddle two blocks of 128 rows) and s_x per column. Y is D transposed: movmatrix turns an 8x8 block of BF16 in
// registers, after which four lanes hold 16 contiguous bytes of a row of Y.

#include <algorithm>

#include "epilogue.cuh"
#include "launch.h"
#include "pipeline.cuh"

namespace jetrl {

namespace {

struct DecodeParams {
  Scales x_scales, w_scales;
  Bias bias;
  Output y;
  int m, n, k_blocks;
  int rows;     // of W per tile
  int stages;
  int tiles_m;  // tiles of tokens: cluster tile t is tile t % tiles_m of tokens and t / tiles_m of W, so W stays in L2
  int tiles;    // of clusters
};

template <int kTokens_, int kCluster_, int kConsumers_>
struct DecodeShape {
  static constexpr int kTokens = kTokens_, kCluster = kCluster_, kConsumers = kConsumers_;
  static constexpr int kThreads = 128 * kConsumers + 32;
  static constexpr int kMaxRows = 64 * kConsumers;
  static constexpr int kTileX = kTokens * kGroup;
  static constexpr int kScales = kTokens + 4;  // floats per stage: tokens, then up to two blocks of W
  static constexpr int kMaxStages = 32;

  static_assert(kTokens % (8 * kCluster) == 0, "each block of a cluster loads whole swizzle atoms of X");

  // Byte offsets in shared memory; wgmma reads kMaxRows rows from the last tile of W, so something must lie behind it.
  JETRL_HOST_DEVICE static constexpr int at_x(int rows, int stages) { return stages * rows * kGroup; }
  JETRL_HOST_DEVICE static constexpr int at_scales(int rows, int stages) {
    return at_x(rows, stages) + stages * kTileX;
  }
  JETRL_HOST_DEVICE static constexpr int at_full(int rows, int stages) {
    return at_scales(rows, stages) + stages * kScales * 4;
  }
  JETRL_HOST_DEVICE static constexpr int at_empty(int rows, int stages) { return at_full(rows, stages) + 8 * stages; }
  JETRL_HOST_DEVICE static constexpr int bytes(int rows, int stages) {
    const int used = at_empty(rows, stages) + 8 * stages;
    const int read = ((stages - 1) * rows + kMaxRows) * kGroup;
    return used > read ? used : read;
  }
};

template <class Shape>
JETRL_DEVICE void decode_produce(const sm90::TensorMap* x_map, const sm90::TensorMap* w_map, const DecodeParams& p,
                                 uint32_t base, StageRing ring, int rank, int lane) {
  const uint32_t base_x = base + Shape::at_x(p.rows, p.stages);
  const uint32_t base_scales = base + Shape::at_scales(p.rows, p.stages);
  for (int tile = first_tile<Shape::kCluster>(); tile < p.tiles; tile += tile_step<Shape::kCluster>()) {
    const int token = tile % p.tiles_m * Shape::kTokens, row = (tile / p.tiles_m * Shape::kCluster + rank) * p.rows;
    for (int block = 0; block < p.k_blocks; ++block) {
      ring.wait_empty();
      const uint32_t full = ring.full_barrier();
      if (lane == 0) {
        sm90::barrier_arrive_expect(full, p.rows * kGroup + Shape::kTileX);
        sm90::tma_load(base + ring.stage * p.rows * kGroup, w_map, block * kGroup, row, full);
        load_shared_tile<Shape::kTokens, Shape::kCluster>(base_x + ring.stage * Shape::kTileX, x_map, block * kGroup,
                                                          token, rank, full);
      }
      const uint32_t scales = base_scales + ring.stage * Shape::kScales * 4;
      load_scales<Shape::kTokens>(scales, p.x_scales, block, token, p.m, lane);
      load_scales<2>(scales + 4 * Shape::kTokens, p.w_scales, block, row / kGroup, ceil_div(p.n, kGroup), lane);
      sm90::cp_async_arrive(full);
      ring.advance();
    }
  }
}

// What a consumer warpgroup needs to start a chain and to promote one.
template <class Shape>
struct DecodeTile {
  uint64_t w, x;  // descriptors of this warpgroup's 64 rows and of the tokens in stage 0
  int w_step;     // between stages, in units of the descriptor
  const float* scales;
  int upper_block, lower_block;  // which of the tile's blocks of 128 rows this thread's rows belong to
  int lane;

  JETRL_DEVICE void start(float (&partial)[Shape::kTokens / 2], StageRing& ring) const {
    ring.wait_full();
    issue_chain<Shape::kTokens>(partial, w + ring.stage * w_step, x + ring.stage * (Shape::kTileX / 16));
    ring.advance();
  }

  // Waits for the older chain, of which kPending younger ones may go on, promotes it and gives its stage back.
  template <int kPending>
  JETRL_DEVICE void finish(float (&acc)[Shape::kTokens / 2], float (&partial)[Shape::kTokens / 2],
                           StageRing& ring) const {
    const float* of_stage = scales + ring.stage * Shape::kScales;
    const float w_upper = of_stage[Shape::kTokens + upper_block], w_lower = of_stage[Shape::kTokens + lower_block];
    sm90::wgmma_wait<kPending>(partial);
#pragma unroll
    for (int j = 0; j < Shape::kTokens / 8; ++j) {
      const float2 x_scale = *reinterpret_cast<const float2*>(of_stage + 8 * j + 2 * (lane % 4));
      acc[4 * j] = sm90::multiply_add(partial[4 * j], sm90::multiply(x_scale.x, w_upper), acc[4 * j]);
      acc[4 * j + 1] = sm90::multiply_add(partial[4 * j + 1], sm90::multiply(x_scale.y, w_upper), acc[4 * j + 1]);
      acc[4 * j + 2] = sm90::multiply_add(partial[4 * j + 2], sm90::multiply(x_scale.x, w_lower), acc[4 * j + 2]);
      acc[4 * j + 3] = sm90::multiply_add(partial[4 * j + 3], sm90::multiply(x_scale.y, w_lower), acc[4 * j + 3]);
    }
    ring.template release<Shape::kCluster>(lane);
    ring.advance();
  }
};

template <class Shape>
JETRL_DEVICE void decode_consume(const DecodeParams& p, uint8_t* memory, StageRing ring, int consumer, int rank,
                                 int warp, int lane) {
  constexpr int kTokens = Shape::kTokens;
  const uint32_t base = sm90::shared_address(memory);
  DecodeTile<Shape> part;
  part.w = operand_descriptor(base) + consumer * kDescriptorStep64Rows;
  part.x = operand_descriptor(base + Shape::at_x(p.rows, p.stages));
  part.w_step = p.rows * kGroup / 16;
  part.scales = reinterpret_cast<const float*>(memory + Shape::at_scales(p.rows, p.stages));
  part.lane = lane;
  StageRing started = ring, finished = ring;
  const int warp_row = 64 * consumer + 16 * warp;  // within the tile

  float even[kTokens / 2], odd[kTokens / 2];
  for (int tile = first_tile<Shape::kCluster>(); tile < p.tiles; tile += tile_step<Shape::kCluster>()) {
    const int token = tile % p.tiles_m * kTokens, first = (tile / p.tiles_m * Shape::kCluster + rank) * p.rows;
    const int upper = first + warp_row + lane / 4, lower = upper + 8;
    // Rows past the tile's may lie past its second block, too; they are not stored, any scale serves.
    part.upper_block = upper / kGroup > first / kGroup, part.lower_block = lower / kGroup > first / kGroup;
    float acc[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;

    // No branch around a wgmma: the compiler serialises chains whose order it cannot follow.
    part.start(even, started);
    int left = p.k_blocks;
    for (; left > 2; left -= 2) {
      part.start(odd, started);
      part.template finish<1>(acc, even, finished);
      part.start(even, started);
      part.template finish<1>(acc, odd, finished);
    }
    if (left == 2) {
      part.start(odd, started);
      part.template finish<1>(acc, even, finished);
      part.template finish<0>(acc, odd, finished);
    } else {
      part.template finish<0>(acc, even, finished);
    }

    float bias_upper = 0.0f, bias_lower = 0.0f;
    if (p.bias.data != nullptr) {
      if (upper < p.n) bias_upper = load_bias(p.bias, upper);
      if (lower < p.n) bias_lower = load_bias(p.bias, lower);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bias = half == 0 ? bias_upper : bias_lower;
      const int eight = warp_row + 8 * half, column = first + eight + 2 * (lane % 4);
      const bool stored = eight < p.rows && column < p.n;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        float low = acc[4 * j + 2 * half], high = acc[4 * j + 2 * half + 1];
        if (p.bias.data != nullptr) low = sm90::add(low, bias), high = sm90::add(high, bias);
        const uint32_t pair = sm90::transpose_8x8(sm90::pack_bf16(low, high));
        const int row = token + 8 * j + lane / 4;
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
  const StageRing ring{base + Shape::at_full(p.rows, p.stages), base + Shape::at_empty(p.rows, p.stages), p.stages};
  const int thread = sm90::thread_index(), lane = thread % 32, warp = sm90::warp_uniform(thread / 32);
  const int rank = Shape::kCluster == 1 ? 0 : sm90::rank_in_cluster();

  if (thread == 0) {
    sm90::prefetch_tensor_map(&x_map);
    sm90::prefetch_tensor_map(&w_map);
    ring.template init<Shape::kCluster, 4 * Shape::kConsumers>();
  }
  sync_cluster_or_block<Shape::kCluster>();

  if (warp == 4 * Shape::kConsumers) {
    decode_produce<Shape>(&x_map, &w_map, p, base, ring, rank, lane);
  } else {
    decode_consume<Shape>(p, memory, ring, warp / 4, rank, warp % 4, lane);
  }
  // No block leaves while another of its cluster may still arrive at its barriers.
  if (Shape::kCluster > 1) sm90::sync_cluster();
}

constexpr int kSpare = 1024;  // bytes of shared memory that a block leaves to the system

// `blocks`: how many run at once.
template <class Shape>
void run_decode(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, int rows, int blocks,
                Stream stream) {
  const int k_blocks = ceil_div(k, kGroup), tiles_m = ceil_div(x.rows, Shape::kTokens);
  int stages = 2;
  while (stages < Shape::kMaxStages && Shape::bytes(rows, stages + 1) <= kSharedMemory - kSpare) ++stages;
  const int tiles = tiles_m * ceil_div(w.rows, rows * Shape::kCluster);
  const DecodeParams p{x.scales, w.scales, bias, y, x.rows, w.rows, k_blocks, rows, stages, tiles_m, tiles};
  const auto x_map = operand_map(x, k, Shape::kTokens / Shape::kCluster);
  const auto w_map = operand_map(w, k, rows);
  const int clusters = std::min(tiles, blocks / Shape::kCluster);
  launch<sm90_decode_fprop<Shape>>(clusters * Shape::kCluster, Shape::kCluster, Shape::kThreads,
                                   Shape::bytes(rows, stages), stream, x_map, w_map, p);
}

// Rows of W per tile: the fewest rounds of `blocks` blocks that tiles of up to `most` rows need, spread evenly over
// them.
int choose_rows(int m_tiles, int n, int blocks, int most) {
  for (int rounds = 1;; ++rounds) {
    const int rows = round_up(ceil_div(n * m_tiles, blocks * rounds), 8);
    if (rows <= most) return std::max(rows, 16);
  }
}

template <int kTokens, int kCluster>
void run_decode(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, int rows, Stream stream) {
  using Narrow = DecodeShape<kTokens, kCluster, 1>;
  // 128 tokens take 64 accumulators and 2 x 64 partial sums, too many registers for a second warpgroup.
  constexpr int kMostRows = kTokens == 128 ? 64 : 128;
  const int blocks = resident_blocks<sm90_decode_fprop<Narrow>>(kCluster, Narrow::kThreads, kSharedMemory - kSpare);
  if (rows == 0) rows = choose_rows(ceil_div(x.rows, kTokens), w.rows, blocks, kMostRows);
  if (rows % 8 != 0 || rows < 8 || rows > kMostRows) {
    refuse("decode_fprop: a tile has a multiple of 8 rows of W, up to " + std::to_string(kMostRows) +
           "; leave block_m 0 for the kernel's choice");
  }
  if (rows <= 64) return run_decode<Narrow>(x, w, k, bias, y, rows, blocks, stream);
  if constexpr (kMostRows > 64) {
    run_decode<DecodeShape<kTokens, kCluster, 2>>(x, w, k, bias, y, rows, blocks, stream);
  }
}

}  // namespace

void decode_fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config,
                  Stream stream) {
  int tokens = 8;
  while (tokens < x.rows && tokens < 128) tokens *= 2;
  const int cluster = config.cluster ? config.cluster : 1;  // sharing tokens by multicast gained nothing on an H200
  const int choice = tokens * 10 + cluster;
  const int rows = config.block_m;
  switch (choice) {
    case 81: return run_decode<8, 1>(x, w, k, bias, y, rows, stream);
    case 161: return run_decode<16, 1>(x, w, k, bias, y, rows, stream);
    case 162: return run_decode<16, 2>(x, w, k, bias, y, rows, stream);
    case 321: return run_decode<32, 1>(x, w, k, bias, y, rows, stream);
    case 322: return run_decode<32, 2>(x, w, k, bias, y, rows, stream);
    case 641: return run_decode<64, 1>(x, w, k, bias, y, rows, stream);
    case 642: return run_decode<64, 2>(x, w, k, bias, y, rows, stream);
    case 644: return run_decode<64, 4>(x, w, k, bias, y, rows, stream);
    case 1281: return run_decode<128, 1>(x, w, k, bias, y, rows, stream);
    case 1284: return run_decode<128, 4>(x, w, k, bias, y, rows, stream);
    default:
      refuse("decode_fprop: no kernel for " + std::to_string(tokens) + " tokens in clusters of " +
             std::to_string(cluster) + "; leave the cluster 0 for the kernel's choice");
  }
}

}  // namespace jetrl

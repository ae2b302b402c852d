// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The transpose of a quantized weight [N, K] with 128x128 scales: blocks are square, so qdata and scales only move. The
// contract is transpose_128x128 of reference/quantize.py.
//
// 2 bytes per element: the limit is whole lines in flight. A block is one tile (byte_tile.cuh). A lane has 16 rows of
// four columns as 16 words; four words of four rows are a 4 x 4 matrix of bytes, which eight byte permutations
// transpose:
//
//   rows 0, 1:  a3 a2 a1 a0, b3 b2 b1 b0  ->  b1 a1 b0 a0  and  b3 a3 b2 a2      (written from the high byte down)
//   rows 2, 3:  the same of c and d;  halves of equal columns then make  d0 c0 b0 a0, d1 c1 b1 a1, ...

#include "byte_tile.cuh"
#include "launch.h"

namespace jetrl {
namespace {

struct TransposeParams {
  const uint8_t* qdata;
  Scales scales;
  uint8_t* out;
  float* out_scales;
  uint32_t stride, out_stride;
  int rows, k;
};

JETRL_KERNEL void __launch_bounds__(ByteTile::kThreads, 4) sm90_transpose(JETRL_GRID_CONSTANT TransposeParams p) {
  uint8_t* tile = sm90::dynamic_shared_memory();
  const int tile_row = sm90::block_index(), tile_column = sm90::block_column();
  const int thread = sm90::thread_index(), warp = thread / 32, t = thread % 32 / 4, c = thread % 4;

  ByteTile::copy(sm90::shared_address(tile), p.qdata, p.stride, tile_row * kGroup, tile_column * kGroup, p.rows, p.k);
  if (thread == 0) {
    p.out_scales[int64_t(tile_column) * sm90::grid_size() + tile_row] =
        p.scales.data[tile_row * p.scales.stride_row + tile_column * p.scales.stride_group];
  }
  const int row = tile_row * kGroup + ByteTile::kChunk * t,
            column = tile_column * kGroup + ByteTile::kChunk * warp + 4 * c;
  const uint8_t* mine = ByteTile::of_lane(tile, warp, t, c);
  sm90::cp_async_wait();
  sm90::sync_block();
  if (row >= p.rows || column >= p.k) return;

  uint32_t columns[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t rows[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[j] = *reinterpret_cast<const uint32_t*>(mine + kGroup * (4 * i + j));
    const uint32_t ab01 = sm90::permute_bytes(rows[0], rows[1], 0x5140),
                   ab23 = sm90::permute_bytes(rows[0], rows[1], 0x7362);
    const uint32_t cd01 = sm90::permute_bytes(rows[2], rows[3], 0x5140),
                   cd23 = sm90::permute_bytes(rows[2], rows[3], 0x7362);
    columns[0][i] = sm90::permute_bytes(ab01, cd01, 0x5410);
    columns[1][i] = sm90::permute_bytes(ab01, cd01, 0x7632);
    columns[2][i] = sm90::permute_bytes(ab23, cd23, 0x5410);
    columns[3][i] = sm90::permute_bytes(ab23, cd23, 0x7632);
  }
  uint8_t* out = p.out + uint64_t(uint32_t(column)) * p.out_stride + row;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    *reinterpret_cast<uint4*>(out + uint64_t(p.out_stride) * n) =
        uint4{columns[n][0], columns[n][1], columns[n][2], columns[n][3]};
  }
}

}  // namespace

void transpose_128x128(const Operand& w, int k, const Transposed& out, Stream stream) {
  const TransposeParams p{static_cast<const uint8_t*>(w.qdata),
                          w.scales,
                          static_cast<uint8_t*>(out.qdata),
                          out.scales,
                          uint32_t(w.row_stride),
                          uint32_t(out.row_stride),
                          w.rows,
                          k};
  const Grid grid{ceil_div(w.rows, kGroup), 1, ByteTile::kThreads, ByteTile::kBytes, stream, false,
                  ceil_div(k, kGroup)};
  launch<sm90_transpose>(grid, p);
}

}  // namespace jetrl

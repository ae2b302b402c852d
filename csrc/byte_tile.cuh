// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Transposes a tile of 128 x 128 bytes in shared memory: whole cache lines on both sides, no bank conflict.
//
// In: 256 threads copy 16 bytes each by cp.async, eight threads a row, so a warp reads four whole lines of 128 bytes.
//
// Out: warp w has the columns 16 w to 16 w + 15 of the tile; its lane (t, c) = (lane / 4, lane % 4) has the rows 16 t
// to 16 t + 15 of the columns 4 c to 4 c + 3, a word per row. So a lane writes 16 consecutive bytes of a row of the
// result, and the eight lanes of one c a whole line.
//
// Between: chunk i (16 bytes) of row r is at place i ^ (r / 16). A warp reads a word per lane, from eight rows 16
// apart: chunk w is at eight different places, so the 32 words are in 32 banks. r / 16 = t for all rows of a lane, so
// row r + 1 is always 128 bytes on and no address is computed between the reads.

#pragma once

#include "sm90.cuh"

namespace jetrl {

struct ByteTile {
  static constexpr int kThreads = 256;
  static constexpr int kBytes = kGroup * kGroup;
  static constexpr int kChunk = 16;  // bytes of a copy, rows of a lane, columns of a warp

  // This thread's copies of the tile at (row, column); zeros outside the matrix of `rows` x `columns`. `columns` and
  // `stride` are multiples of 16.
  JETRL_DEVICE static void copy(uint32_t tile, const uint8_t* from, uint32_t stride, int row, int column, int rows,
                                int columns) {
    const int thread = sm90::thread_index(), chunk = thread % 8, first = thread / 8;
    const uint32_t to = tile + first * kGroup + (chunk ^ first / kChunk) * kChunk;
    from += uint64_t(uint32_t(row + first)) * stride + column + chunk * kChunk;
    const int left = column + chunk * kChunk < columns ? rows - row - first : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 32 rows on, so two places: (first / 16 + 2 i) ^ chunk = (first / 16 ^ chunk) ^ 2 i
      sm90::cp_async_16((to ^ 2 * i * kChunk) + 32 * i * kGroup, from + uint64_t(stride) * (32 * i), 32 * i < left);
    }
  }

  // The lane's first byte: row 16 t, column 16 w + 4 c.
  JETRL_DEVICE static const uint8_t* of_lane(const uint8_t* tile, int warp, int t, int c) {
    return tile + t * kChunk * kGroup + (warp ^ t) * kChunk + 4 * c;
  }
};

}  // namespace jetrl

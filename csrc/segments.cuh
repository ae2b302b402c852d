// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Assigns tiles of experts to blocks where only the device knows the rows of experts (gemm.h, Segments).
//
// Tiles go by experts, in an expert by rows, and through all columns of a row of tiles: W of one expert stays in L2,
// its rows are read once. No tile has rows of two experts. A warp finds a tile's expert among 32 at once by a scan over
// its lanes; it asks for ascending tiles, so it passes over the experts once.

#pragma once

#include "sm90.cuh"

namespace jetrl {

struct SegmentTile {
  int expert, row, end, tile_n;  // its first row, the row after its expert's last, its place among the columns
};

template <int kRows>
struct SegmentTiles {
  Segments of;
  int tiles_n;
  int first = 0, before = 0;  // first of the 32 experts in the scan, and the number of tiles before it

  // By a whole warp: the number of tiles.
  JETRL_DEVICE int count(int lane) const {
    int tiles = 0;
    for (int e = lane; e < of.experts; e += 32) tiles += ceil_div(of.start[e + 1] - of.start[e], kRows);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) tiles += int(sm90::shuffle_xor(uint32_t(tiles), mask));
    return tiles * tiles_n;
  }

  // By a whole warp, for ascending tiles; false if there are fewer.
  JETRL_DEVICE bool locate(int tile, int lane, SegmentTile& at) {
    for (; first < of.experts; first += 32) {
      const int expert = first + lane;
      int from = 0, to = 0;
      if (expert < of.experts) from = of.start[expert], to = of.start[expert + 1];
      int last = ceil_div(to - from, kRows) * tiles_n;  // tiles up to this expert's last
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int others = sm90::shuffle_up(last, step);
        if (lane >= step) last += others;
      }
      last += before;
      const int passed = sm90::count_true(last <= tile);
      if (passed < 32) {
        const int row = sm90::shuffle(from, passed), end = sm90::shuffle(to, passed);
        const int in_expert = tile - sm90::shuffle(last, passed) + ceil_div(end - row, kRows) * tiles_n;
        const int tile_m = in_expert / tiles_n;
        at = {first + passed, row + tile_m * kRows, end, in_expert - tile_m * tiles_n};
        return true;
      }
      before = sm90::shuffle(last, 31);
    }
    return false;
  }
};

}  // namespace jetrl

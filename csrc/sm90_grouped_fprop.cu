// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// FProp and DGrad of a mixture's experts on Hopper for many rows: the kernel of fprop.cuh, each tile with its expert's
// W. For few rows per expert see sm90_grouped_decode.cu.
//
// The grid fits the worst case; a block that finds no tile ends. An expert's tiles, of all slices of K, run at about
// the same time, so its rows and its W, a few MB, are read once from device memory.

#include <algorithm>

#include "fprop.cuh"

namespace jetrl {

namespace {

template <int kBlockN, int kCluster>
void run_grouped(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                 Stream stream) {
  using Shape = FpropShape<kBlockN, kCluster, false, true>;
  const int most = most_row_tiles(x.rows, segments.experts, Shape::kBlockM);
  const int tiles_n = ceil_div(w.n, kCluster * kBlockN);
  const TileOrder order{most, slices * tiles_n, 1};
  const int k_blocks = w.k / kGroup, slice_blocks = k_blocks / slices;
  const bool tma_scales = segments.aligned && scales_suit_tma(x.scales, x.rows);
  const FpropParams p{x.scales,     w.all.scales, {nullptr, false}, y,        x.rows,     w.n,           slice_blocks,
                      slice_blocks, tma_scales,   order,            segments, w.row_step, w.column_step, w.scale_step,
                      tiles_n,      x.rows};
  const auto x_map = operand_map(x, w.k, Shape::kBlockM / kCluster);
  const auto w_map = operand_map(w.all, w.columns, kBlockN);
  const auto x_scales_map = tma_scales ? scales_map(x.scales, x.rows, k_blocks, Shape::kBlockM / kCluster) : x_map;
  const int clusters = std::min<int64_t>(int64_t(most) * order.tiles_n, multiprocessors() / kCluster);
  const Grid grid{clusters * kCluster, kCluster, Shape::kThreads, Shape::kBytes, stream};
  launch<sm90_fprop<Shape>>(grid, x_map, w_map, x_scales_map, output_map(y, slices * x.rows, w.n), p);
}

}  // namespace

void grouped_fprop(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                   Config config, Stream stream) {
  if (!has_slices(w.k, slices)) refuse("grouped_fprop: a slice of K must be a multiple of 128; use fewer slices");
  const int block = config.block ? config.block : w.n > kGroup ? 256 : 128;
  // No block of a pair may be left without columns.
  const int cluster = config.cluster ? config.cluster : ceil_div(w.n, block) % 2 == 0 ? 2 : 1;
  switch (block * 10 + cluster) {
    case 1281: return run_grouped<128, 1>(x, w, segments, slices, y, stream);
    case 1282: return run_grouped<128, 2>(x, w, segments, slices, y, stream);
    case 2561: return run_grouped<256, 1>(x, w, segments, slices, y, stream);
    case 2562: return run_grouped<256, 2>(x, w, segments, slices, y, stream);
    default:
      refuse("grouped_fprop: tiles take 128 or 256 rows of W, clusters 1 or 2 blocks; leave them 0 for the kernel's "
             "choice");
  }
}

}  // namespace jetrl

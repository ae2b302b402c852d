// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// FProp and DGrad of one weight on Hopper, and the sum of ranks' products: the kernel of fprop.cuh and its tiles.

#include <algorithm>

#include "fprop.cuh"

namespace jetrl {

namespace {

template <class Shape>
void run_fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Stream stream,
               int ranks = 1) {
  const TileOrder order{ceil_div(x.rows, Shape::kCluster * Shape::kBlockM), ceil_div(w.rows, Shape::kBlockN),
                        2048 / (Shape::kCluster * Shape::kBlockM)};
  const int k_blocks = ceil_div(k, kGroup);
  const bool tma_scales = scales_suit_tma(x.scales, x.rows);
  const FpropParams p{x.scales, w.scales, bias, y, x.rows, w.rows, k_blocks, k_blocks / ranks, tma_scales, order};
  const auto x_map = operand_map(x, k, Shape::kBlockM);
  const auto w_map = operand_map(w, k, Shape::kBlockN / Shape::kCluster);
  const auto x_scales_map = tma_scales ? scales_map(x.scales, x.rows, k_blocks, Shape::kBlockM) : x_map;
  const int clusters = std::min(order.count(), multiprocessors() / Shape::kCluster);
  const Grid grid{clusters * Shape::kCluster, Shape::kCluster, Shape::kThreads, Shape::kBytes, stream};
  launch<sm90_fprop<Shape>>(grid, x_map, w_map, x_scales_map, output_map(y, x.rows, w.rows), p);
}

// Of the time of a round of 256 columns, one of 192 takes 0.73 to 0.77, of 128 0.49 to 0.56, of 64 0.33 to 0.38 (H200,
// four rounds less one, K from 3584 to 12288; the fixed cost of a launch is the same for all).
constexpr TileCost kTiles[] = {{256, 100}, {192, 76}, {128, 55}, {64, 38}};
constexpr TileCost kTilesOfRanks[] = {{128, 55}, {64, 38}};

}  // namespace

void fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config, Stream stream) {
  const int block = config.block ? config.block : choose_block(kTiles, w.rows, x.rows, multiprocessors());
  const int cluster = config.cluster ? config.cluster : x.rows > 128 ? 2 : 1;
  switch (block * 10 + cluster) {
    case 641: return run_fprop<FpropShape<64, 1>>(x, w, k, bias, y, stream);
    case 642: return run_fprop<FpropShape<64, 2>>(x, w, k, bias, y, stream);
    case 1281: return run_fprop<FpropShape<128, 1>>(x, w, k, bias, y, stream);
    case 1282: return run_fprop<FpropShape<128, 2>>(x, w, k, bias, y, stream);
    case 1921: return run_fprop<FpropShape<192, 1>>(x, w, k, bias, y, stream);
    case 1922: return run_fprop<FpropShape<192, 2>>(x, w, k, bias, y, stream);
    case 2561: return run_fprop<FpropShape<256, 1>>(x, w, k, bias, y, stream);
    case 2562: return run_fprop<FpropShape<256, 2>>(x, w, k, bias, y, stream);
    default:
      refuse(
          "fprop: tiles take 64, 128, 192 or 256 rows of W, clusters 1 or 2 blocks; leave them 0 for the kernel's "
          "choice");
  }
}

void fprop_of_ranks(const Operand& x, const Operand& w, int k, int ranks, const Output& y, Config config,
                    Stream stream) {
  if (!has_slices(k, ranks)) {
    refuse("fprop_of_ranks: a rank's slice of K must be a multiple of " + std::to_string(kGroup) + "; use fewer ranks");
  }
  const int block = config.block ? config.block : choose_block(kTilesOfRanks, w.rows, x.rows, multiprocessors());
  const int cluster = config.cluster ? config.cluster : x.rows > 128 ? 2 : 1;
  const Bias none{nullptr, false};
  switch (block * 10 + cluster) {
    case 641: return run_fprop<FpropShape<64, 1, true>>(x, w, k, none, y, stream, ranks);
    case 642: return run_fprop<FpropShape<64, 2, true>>(x, w, k, none, y, stream, ranks);
    case 1281: return run_fprop<FpropShape<128, 1, true>>(x, w, k, none, y, stream, ranks);
    case 1282: return run_fprop<FpropShape<128, 2, true>>(x, w, k, none, y, stream, ranks);
    default:
      refuse("fprop_of_ranks: tiles take 64 or 128 rows of W, clusters 1 or 2 blocks; leave them 0 for the kernel's "
             "choice");
  }
}

}  // namespace jetrl

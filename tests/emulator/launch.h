// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// launch.h for the emulator: the same functions, on the CPU's memory.

#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "sm90.h"

namespace jetrl {

[[noreturn]] inline void refuse(const std::string& sentence) { throw std::invalid_argument("jetrl: " + sentence); }

int multiprocessors();
void run_grid(const Grid& grid, const std::function<void()>& kernel);

// Checks the conditions of cuTensorMapEncodeTiled.
inline sm90::TensorMap operand_map(const Operand& operand, int k, int box_rows) {
  if (reinterpret_cast<uintptr_t>(operand.qdata) % 16 != 0 || operand.row_stride % 16 != 0 || operand.row_stride < k ||
      box_rows < 1 || box_rows > 256 || k < 1 || operand.rows < 1) {
    throw std::runtime_error("the hardware refuses this tensor map");
  }
  return {static_cast<const uint8_t*>(operand.qdata), k, operand.rows, operand.row_stride, box_rows};
}

inline sm90::TensorMap scales_map(const Scales& scales, int rows, int groups, int box_rows) {
  const int64_t stride = scales.stride_group * 4;
  if (reinterpret_cast<uintptr_t>(scales.data) % 16 != 0 || stride % 16 != 0 || box_rows < 4 || box_rows > 256) {
    throw std::runtime_error("the hardware refuses this tensor map");
  }
  return {reinterpret_cast<const uint8_t*>(scales.data), rows, groups, stride, 1, 4, box_rows};
}

inline sm90::TensorMap output_map(const Output& out, int rows, int columns) {
  if (reinterpret_cast<uintptr_t>(out.data) % 16 != 0 || out.row_stride * 2 % 16 != 0) {
    throw std::runtime_error("the hardware refuses this tensor map");
  }
  return {static_cast<const uint8_t*>(out.data), columns, rows, out.row_stride * 2, kStoreRows, 2, kStoreColumns};
}

template <auto kKernel>
int clusters_at_once(const Grid& grid) {
  return multiprocessors() / grid.cluster;
}

template <auto kKernel, class... Arguments>
void launch(const Grid& grid, const Arguments&... arguments) {
  run_grid(grid, [&] { kKernel(arguments...); });
}

}  // namespace jetrl

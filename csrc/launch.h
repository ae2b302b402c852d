// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The host side of a kernel launch: TMA descriptors, the number of multiprocessors, clusters, overlap with the previous
// kernel. cuTensorMapEncodeTiled comes from the driver at run time, so that the library loads without a driver.

#pragma once

#ifdef JETRL_EMULATE
#include "emulator/launch.h"
#else

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "gemm.h"

namespace jetrl {

[[noreturn]] inline void refuse(const std::string& sentence) { throw std::invalid_argument("jetrl: " + sentence); }

inline void check(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("jetrl: ") + doing + " failed: " + cudaGetErrorString(error));
  }
}

// A matrix of `rows` rows of `columns` elements, rows `stride` bytes apart, read in boxes.
inline CUtensorMap tensor_map(const char* what, CUtensorMapDataType type, const void* data, int64_t columns,
                              int64_t rows, int64_t stride, int box_columns, int box_rows, CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "asking the driver for cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("jetrl: the driver has no TMA; update it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint64_t extents[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t strides[1] = {cuuint64_t(stride)};
  const cuuint32_t box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(&map, type, 2, const_cast<void*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("jetrl: cuTensorMapEncodeTiled refused ") + what + " of " +
                             std::to_string(rows) + " x " + std::to_string(columns) + " with rows of " +
                             std::to_string(stride) + " bytes (CUresult " + std::to_string(int(result)) + ")");
  }
  return map;
}

// FP8 data as a matrix of bytes, read in boxes of `box_rows` rows x 128 bytes under the 128-byte swizzle.
inline CUtensorMap operand_map(const Operand& operand, int k, int box_rows) {
  return tensor_map("qdata", CU_TENSOR_MAP_DATA_TYPE_UINT8, operand.qdata, k, operand.rows, operand.row_stride, kGroup,
                    box_rows, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Scales that scales_suit_tma, a matrix of one row per group, read in boxes of `box_rows` scales of one group.
inline CUtensorMap scales_map(const Scales& scales, int rows, int groups, int box_rows) {
  return tensor_map("scales", CU_TENSOR_MAP_DATA_TYPE_FLOAT32, scales.data, rows, groups, scales.stride_group * 4,
                    box_rows, 1, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// A BF16 output, written in boxes of kStoreRows x kStoreColumns from staging under the 128-byte swizzle.
inline CUtensorMap output_map(const Output& out, int rows, int columns) {
  return tensor_map("the output", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, out.data, columns, rows, out.row_stride * 2,
                    kStoreColumns, kStoreRows, CU_TENSOR_MAP_SWIZZLE_128B);
}

inline int current_device() {
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

inline int multiprocessors() {
  static std::atomic<int> counts[64];
  const int device = current_device();
  int count = counts[device % 64].load();
  if (count == 0) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for the multiprocessors");
    counts[device % 64].store(count);
  }
  return count;
}

template <auto kKernel>
void allow_shared_memory(const Grid& grid) {
  static std::atomic<int> allowed[64];  // that this kernel may have, per device
  std::atomic<int>& mine = allowed[current_device() % 64];
  if (mine.load() < grid.shared_bytes) {
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes),
          "raising the shared memory limit");
    mine.store(grid.shared_bytes);
  }
}

// Clusters of such a grid that the current device holds at once; a cluster lies within one GPC, and GPCs differ in
// size. Cached per kernel, whose grids must agree in threads, bytes and blocks per cluster.
template <auto kKernel>
int clusters_at_once(const Grid& grid) {
  static std::atomic<int> counts[64];  // the count and 1, per device; 0: not queried yet
  std::atomic<int>& mine = counts[current_device() % 64];
  if (mine.load() == 0) {
    allow_shared_memory<kKernel>(grid);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(grid.cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.blocks, grid.columns);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    check(cudaOccupancyMaxActiveClusters(&count, kKernel, &config), "asking for clusters at once");
    mine.store(count + 1);
  }
  return mine.load() - 1;
}

template <auto kKernel, class... Arguments>
void launch(const Grid& grid, const Arguments&... arguments) {
  allow_shared_memory<kKernel>(grid);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks, grid.columns);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(grid.stream);
  config.attrs = attributes;
  config.numAttrs = grid.overlaps ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kKernel, arguments...), "starting a kernel");
}

}  // namespace jetrl

#endif  // JETRL_EMULATE

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Stores the accumulators of a warp, 16 rows x 64, 128 or 192 columns in wgmma's fragment layout, to global memory.
//
// A fragment holds 4 or 8 contiguous bytes of a row, less than a 32-byte sector. So each warp stages 16 rows of 128
// bytes in 2 KB of shared memory: fragments go in, four whole rows per instruction come out, 16 bytes a lane. The
// 16-byte chunks of a row are XORed with the row to avoid bank conflicts:
//   BF16: stmatrix writes one chunk of eight rows at a time: chunk ^ (row % 8) spreads them over all 32 banks.
//   FP32: half a warp writes 8 bytes each of rows g..g+3, two neighboring chunks a row: chunk ^ (2 (row % 4)).
// The layout of BF16 is also the copy engine's 128-byte swizzle: with 2 KB for each 64 columns TMA stores boxes of 16
// rows while the warp goes on (store_bf16_by_tma).
//
// Row and column guards are per 16 bytes: the host requires rows of a multiple of 16 bytes.

#pragma once

#include "sm90.cuh"

namespace jetrl {

constexpr int kStagingBytes = 16 * 128;  // per warp

// The same value, opaque to the compiler, so that addresses derived from it are computed in the epilogue and not kept,
// or spilled, across the main loop.
JETRL_DEVICE int only_here(int value) {
#ifndef JETRL_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}

JETRL_DEVICE float load_bias(const Bias& bias, int column) {
  return bias.fp32 ? static_cast<const float*>(bias.data)[column]
                   : sm90::bf16_to_float(static_cast<const uint16_t*>(bias.data)[column]);
}

struct alignas(16) Chunk {
  uint32_t word[4];
};

// 64 columns, `slice`, into staging: adds the bias in FP32, then rounds once to BF16.
template <bool kBias, int kSums>
JETRL_DEVICE void stage_bf16(uint32_t staging, const float (&acc)[kSums], int slice, const Bias& bias, int column,
                             int columns, int lane) {
  const int quad = lane % 4, eight = lane % 8;
  const int write_row = eight + 8 * (lane / 8 % 2), write_chunk = lane / 16;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n8 = 8 * slice + 2 * pair + i, at = column + 8 * n8 + 2 * quad;
      float d[4] = {acc[4 * n8], acc[4 * n8 + 1], acc[4 * n8 + 2], acc[4 * n8 + 3]};
      if (kBias && at < columns) {
        const float low = load_bias(bias, at), high = load_bias(bias, at + 1);
        d[0] = sm90::add(d[0], low), d[1] = sm90::add(d[1], high);
        d[2] = sm90::add(d[2], low), d[3] = sm90::add(d[3], high);
      }
      packed[2 * i] = sm90::pack_bf16(d[0], d[1]);
      packed[2 * i + 1] = sm90::pack_bf16(d[2], d[3]);
    }
    const int chunk = (2 * pair + write_chunk) ^ eight;
    sm90::stmatrix_x4(staging + write_row * 128 + chunk * 16, packed[0], packed[1], packed[2], packed[3]);
  }
}

JETRL_DEVICE void store_bf16(uint8_t* staging, const float (&acc)[64], const Output& out, int row, int column, int rows,
                             int columns, int lane) {
  const int eight = lane % 8;
#pragma unroll
  for (int slice = 0; slice < 2; ++slice) {
    stage_bf16<false>(sm90::shared_address(staging), acc, slice, Bias{}, column, columns, lane);
    sm90::sync_warp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8, at = column + 64 * slice + 8 * eight;
      const Chunk value = *reinterpret_cast<const Chunk*>(staging + r * 128 + (eight ^ (r % 8)) * 16);
      if (row + r < rows && at < columns) {
        uint16_t* to = static_cast<uint16_t*>(out.data) + (row + r) * out.row_stride + at;
        *reinterpret_cast<Chunk*>(to) = value;
      }
    }
    sm90::sync_warp();
  }
}

// The lane that starts TMA stores. The compiler knows that the target is the same for all lanes, or (kElected) that a
// single lane runs (sm90.cuh).
template <bool kElected>
JETRL_DEVICE bool acts_for_copies(int lane) {
  if constexpr (kElected) {
    return sm90::elect_one();
  } else {
    return lane == 0;
  }
}

// 64, 128 or 192 columns into staging, 2 KB for each 64, from where the copy engine reads them while the warp goes on.
template <bool kElected, int kSums>
JETRL_DEVICE void stage_for_tma(uint32_t staging, const float (&acc)[kSums], const Bias& bias, int column, int columns,
                                int lane) {
  constexpr int kSlices = kSums / 32;
  if (acts_for_copies<kElected>(lane)) sm90::tma_store_wait_read();
  sm90::sync_warp();
  if (bias.data == nullptr) {  // tested once: a test for every eight columns would cut the code into pieces
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      stage_bf16<false>(staging + slice * kStagingBytes, acc, slice, bias, column, columns, lane);
    }
  } else {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      stage_bf16<true>(staging + slice * kStagingBytes, acc, slice, bias, column, columns, lane);
    }
  }
  sm90::fence_for_copies();
  sm90::sync_warp();
}

template <bool kElected, int kSlices>
JETRL_DEVICE void store_staged_by_tma(uint32_t staging, const sm90::TensorMap* map, int row, int column, int lane) {
  if (acts_for_copies<kElected>(lane)) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      sm90::tma_store(map, staging + slice * kStagingBytes, column + slice * kStoreColumns, row);
    }
    sm90::tma_store_commit();
  }
}

template <int kSums>
JETRL_DEVICE void store_bf16_by_tma(uint32_t staging, const float (&acc)[kSums], const Bias& bias,
                                    const sm90::TensorMap* map, int row, int column, int columns, int lane) {
  stage_for_tma<false>(staging, acc, bias, column, columns, lane);
  store_staged_by_tma<false, kSums / 32>(staging, map, row, column, lane);
}

// The warp itself stores what was staged for the copy engine: only rows before `end`.
template <int kSlices>
JETRL_DEVICE void store_staged_rows(const uint8_t* staging, const Output& out, int row, int end, int column,
                                    int columns, int lane) {
  const int eight = lane % 8;
#pragma unroll 1
  for (int i = 0; i < 4 * kSlices; ++i) {
    const int slice = i / 4, r = 4 * (i % 4) + lane / 8, at = column + kStoreColumns * slice + 8 * eight;
    const Chunk value =
        *reinterpret_cast<const Chunk*>(staging + slice * kStagingBytes + r * 128 + (eight ^ (r % 8)) * 16);
    if (row + r < end && at < columns) {
      *reinterpret_cast<Chunk*>(static_cast<uint16_t*>(out.data) + (row + r) * out.row_stride + at) = value;
    }
  }
}

JETRL_DEVICE void store_fp32(uint8_t* staging, const float (&acc)[64], const Output& out, int row, int column, int rows,
                             int columns, int lane) {
  constexpr int kQuarters = 4;
  const int quad = lane % 4, group = lane / 4, eight = lane % 8;
  const int first = row + lane / 8, at = column + 4 * eight;  // of this lane's reads of the staged rows
  float* to = static_cast<float*>(out.data) + first * out.row_stride + at;
  const auto inside = [&](int quarter, int i) { return first + 4 * i < rows && at + 32 * quarter < columns; };

#pragma unroll
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n8 = 4 * quarter + i;
      const int chunk = (2 * i + quad / 2) ^ (2 * (group % 4));
      uint8_t* staged = staging + group * 128 + chunk * 16 + (quad % 2) * 8;
      *reinterpret_cast<float2*>(staged) = {acc[4 * n8], acc[4 * n8 + 1]};
      *reinterpret_cast<float2*>(staged + 8 * 128) = {acc[4 * n8 + 2], acc[4 * n8 + 3]};
    }
    sm90::sync_warp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8;
      const float4 value = *reinterpret_cast<const float4*>(staging + r * 128 + (eight ^ (2 * (r % 4))) * 16);
      if (inside(quarter, i)) *reinterpret_cast<float4*>(to + 4 * i * out.row_stride + 32 * quarter) = value;
    }
    sm90::sync_warp();
  }
}

}  // namespace jetrl

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// FP8 -> FP8 re-layout of saved activations: 1x128 qdata [M, K] to qdata [K, M] with a scale per 128 tokens, WGrad's
// operand. The contract is relayout_128x1 of reference/quantize.py.
//
//   x[m, k]  = qdata[m, k] * scale[m, k / 128]                      FP32, rounded once
//   s[k, g]  = max over the 128 tokens of g of |x| / 448            fp32 rule; pow2: the power of two above
//   out[k,m] = e4m3(x[m, k] / s[k, m / 128])                        scales and quotients as in scales.cuh
//
// 2.06 bytes per element: bandwidth leaves a multiprocessor some 15 issue slots for 32 elements, of which the
// arithmetic takes 7. A block is one tile of 128 x 128 (byte_tile.cuh), with one old scale per row and one new scale
// per column. A lane takes two of its four columns at a time, 16 rows each, in a loop that is not unrolled: 32 live
// numbers, so four or five blocks of 256 threads share a multiprocessor. Blocks go down the rows, so that they write
// neighboring lines.

#include "byte_tile.cuh"
#include "launch.h"
#include "scales.cuh"

namespace jetrl {
namespace {

struct RelayoutParams {
  const uint8_t* qdata;
  const float* scales;
  uint8_t* out;
  float* out_scales;
  int64_t stride_group;
  uint32_t stride, stride_scale, out_stride;
  int rows, k;
};

struct RelayoutShape {
  static constexpr int kAtScales = ByteTile::kBytes;
  static constexpr int kBytes = kAtScales + 4 * kGroup;
};

template <bool kPow2>
JETRL_KERNEL void __launch_bounds__(ByteTile::kThreads, kPow2 ? 4 : 5)
    sm90_relayout(JETRL_GRID_CONSTANT RelayoutParams p) {
  uint8_t* tile = sm90::dynamic_shared_memory();
  const int row = sm90::block_index() * kGroup, first_column = sm90::block_column() * kGroup;
  const int thread = sm90::thread_index(), warp = thread / 32, t = thread % 32 / 4, c = thread % 4;

  ByteTile::copy(sm90::shared_address(tile), p.qdata, p.stride, row, first_column, p.rows, p.k);
  if (thread < kGroup) {
    const float* from = p.scales + sm90::block_column() * p.stride_group;
    sm90::cp_async_f32(sm90::shared_address(tile) + RelayoutShape::kAtScales + 4 * thread,
                       from + uint64_t(uint32_t(row + thread)) * p.stride_scale, row + thread < p.rows);
  }
  const int column = first_column + ByteTile::kChunk * warp + 4 * c;
  uint8_t* out = p.out + uint64_t(uint32_t(column)) * p.out_stride + row + ByteTile::kChunk * t;
  float* out_scales = p.out_scales + uint64_t(uint32_t(sm90::block_index())) * p.k + column;
  const uint8_t* mine = ByteTile::of_lane(tile, warp, t, c);
  const float4* row_scales = reinterpret_cast<const float4*>(tile + RelayoutShape::kAtScales) + 4 * t;
  sm90::cp_async_wait();
  sm90::sync_block();

#pragma unroll 1
  for (int pair = 0; pair < 2; ++pair) {
    float x[2][16], amax[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = row_scales[i];
      const float scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = 4 * i + j;
        const float2 values = sm90::decode_two(*reinterpret_cast<const uint16_t*>(mine + kGroup * r));
        x[0][r] = sm90::multiply(values.x, scales[j]);
        x[1][r] = sm90::multiply(values.y, scales[j]);
        amax[0] = sm90::larger_magnitude(amax[0], x[0][r]);
        amax[1] = sm90::larger_magnitude(amax[1], x[1][r]);
      }
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      amax[0] = sm90::larger_magnitude(amax[0], sm90::shuffle_xor(amax[0], mask));
      amax[1] = sm90::larger_magnitude(amax[1], sm90::shuffle_xor(amax[1], mask));
    }
    float stored[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Divider<kPow2> divide(amax[n]);
      stored[n] = divide.stored;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = qdata_of(divide, x[n][4 * i], x[n][4 * i + 1], x[n][4 * i + 2], x[n][4 * i + 3]);
      }
      if (column < p.k) {
        *reinterpret_cast<uint4*>(out + uint64_t(p.out_stride) * n) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
    if (t == 0 && column < p.k) *reinterpret_cast<float2*>(out_scales) = float2{stored[0], stored[1]};
    mine += 2, out_scales += 2, out += uint64_t(p.out_stride) * 2;
  }
}

}  // namespace

void relayout_128x1(const Operand& x, int k, bool pow2, const Transposed& out, Stream stream) {
  const RelayoutParams p{static_cast<const uint8_t*>(x.qdata),
                         x.scales.data,
                         static_cast<uint8_t*>(out.qdata),
                         out.scales,
                         x.scales.stride_group,
                         uint32_t(x.row_stride),
                         uint32_t(x.scales.stride_row),
                         uint32_t(out.row_stride),
                         x.rows,
                         k};
  const Grid grid{ceil_div(x.rows, kGroup), 1, ByteTile::kThreads, RelayoutShape::kBytes, stream, false,
                  ceil_div(k, kGroup)};
  if (pow2) {
    launch<sm90_relayout<true>>(grid, p);
  } else {
    launch<sm90_relayout<false>>(grid, p);
  }
}

}  // namespace jetrl

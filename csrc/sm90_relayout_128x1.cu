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

// FP8 -> FP8 re-layout of saved activations: 1x128 codes [M, K] to codes [K, M] with a scale per 128 tokens, WGrad's
// operand. numerics/quantize.py, relayout_128x1, is the contract; every byte is its.
//
//   x[m, k]  = code[m, k] * scale[m, k / 128]                       FP32, rounded once
//   s[k, g]  = max over the 128 tokens of g of |x| / 448            fp32 rule; pow2: the power of two above
//   out[k,m] = e4m3(x[m, k] / s[k, m / 128])
//
// 2.06 bytes an element, so at the bandwidth of an H200 a multiprocessor has some 15 issue slots for each 32 elements.
// The arithmetic takes 7 of them: half a conversion of two codes to FP16, one to FP32, two multiplications, a maximum,
// two steps that make a rounded quotient of x r, half a conversion of two. Hence the rest is kept small: a block is one
// tile of 128 x 128 (byte_tile.cuh), which has one old scale per row and one new one per column; a lane holds 16 rows
// of a column, so a column's maximum takes 15 instructions and three shuffles, and its codes leave as they are, 16
// bytes.
//
// Two columns of the lane's four at a time, the second pair in a second round of a loop that is not unrolled: 32
// numbers instead of 64 live at once, and 48 to 64 registers let four or five blocks of 256 threads share a
// multiprocessor. While one waits for its tile, others compute; a second tile ahead within a block gains nothing.
// Blocks follow each other down the rows, so that the lines that they write lie side by side: 4 to 6% more than along
// the columns (docs/LOG.md).
//
// Scales and quotients are scales.cuh's.

#include "byte_tile.cuh"
#include "launch.h"
#include "scales.cuh"

namespace jetrl {
namespace {

struct RelayoutParams {
  const uint8_t* codes;
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

  ByteTile::copy(sm90::shared_address(tile), p.codes, p.stride, row, first_column, p.rows, p.k);
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
        words[i] = codes_of(divide, x[n][4 * i], x[n][4 * i + 1], x[n][4 * i + 2], x[n][4 * i + 3]);
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
  const RelayoutParams p{static_cast<const uint8_t*>(x.codes),
                         x.scales.data,
                         static_cast<uint8_t*>(out.codes),
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

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The gradients of silu(gate) * up, rounded to BF16 in registers and quantized for both GEMMs that read them: groups of
// 128 features for DGrad and of 128 tokens, transposed, for WGrad. The contract is silu_mul_backward_quantize of
// kernels/silu_mul.py.
//
//   sigma  = 1 / (1 + 2^(-gate log2 e))                     each operation rounded to FP32, 1 + .. fused
//   dgate  = dY up sigma (1 + gate (1 - sigma)),   dup = dY gate sigma
//
// A block is a tile of 128 tokens by 128 features, so it has whole groups of both kinds. First its threads go along the
// rows, 16 lanes a row, 8 features each, and load the next row early: gradients, row maximum, row qdata; the gradients
// go to shared memory as pairs of BF16 numbers. After a sync the warps go down the columns as in byte_tile.cuh: a warp
// has 8 columns, its lane (t, c) 16 tokens of two of them. Shared memory has a matrix per gradient: rows of 256 bytes
// in 16 chunks; chunk i of row r is at place i ^ (r / 16 % 8), so the eight rows that a warp reads lie in different
// banks.

#include "launch.h"
#include "scales.cuh"

namespace jetrl {
namespace {

struct SiluShape {
  static constexpr int kThreads = 512;
  static constexpr int kRowsAtOnce = kThreads / 16, kPasses = kGroup / kRowsAtOnce;
  static constexpr int kChunk = 16, kChunks = 16;  // bytes of a chunk, chunks of a row
  static constexpr int kRow = kChunk * kChunks;
  static constexpr int kMatrix = kGroup * kRow;
  static constexpr int kBytes = 2 * kMatrix;
};

struct Gradient {
  uint8_t* qdata;  // [rows, k]
  float* scales;   // [k / 128, rows]
  uint8_t* column_qdata;
  float* column_scales;  // [ceil(rows / 128), k]
};

struct SiluParams {
  const uint16_t *dy, *gate, *up;
  Gradient gradients[2];  // of gate, of up
  uint32_t stride_dy, stride_gate, stride_up, column_stride;
  int rows, k;
};

struct Operands {
  uint4 dy, gate, up;  // eight BF16 numbers each
};

using sm90::high_half, sm90::low_half;

struct GradientPair {
  float gate, up;

  JETRL_DEVICE GradientPair(float dy, float g, float u) {
    const float power = sm90::exp2_about(sm90::multiply(-g, 0x1.715476p+0f)), sum = sm90::add(power, 1.0f);
    // div.full.f32 without its handling of small divisors. A reciprocal near 2^-126 is not flushed: dY may be large.
    const bool large = sum > 0x1p126f;
    const float about = sm90::reciprocal_about(large ? sm90::multiply(sum, 0.25f) : sum);
    const float sigma = large ? sm90::multiply(about, 0.25f) : about;
    const float slope = sm90::multiply_add(sm90::add(1.0f, -sigma), g, 1.0f);
    gate = sm90::multiply(sm90::multiply(sm90::multiply(dy, u), sigma), slope);
    up = sm90::multiply(sm90::multiply(dy, g), sigma);
  }
};

template <int N>
JETRL_DEVICE uint32_t largest_of(const uint32_t (&words)[N]) {
  uint32_t largest = words[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = sm90::larger_pair(largest, words[i]);
  return largest;
}

// The qdata of eight BF16 numbers with one scale.
template <class Division>
JETRL_DEVICE uint2 row_qdata(const Division& divide, const uint32_t (&w)[4]) {
  return uint2{qdata_of(divide, low_half(w[0]), high_half(w[0]), low_half(w[1]), high_half(w[1])),
               qdata_of(divide, low_half(w[2]), high_half(w[2]), low_half(w[3]), high_half(w[3]))};
}

// Four qdata down a column from the halves of four words.
template <class Division>
JETRL_DEVICE uint32_t low_qdata(const Division& divide, const uint32_t* w) {
  return qdata_of(divide, low_half(w[0]), low_half(w[1]), low_half(w[2]), low_half(w[3]));
}
template <class Division>
JETRL_DEVICE uint32_t high_qdata(const Division& divide, const uint32_t* w) {
  return qdata_of(divide, high_half(w[0]), high_half(w[1]), high_half(w[2]), high_half(w[3]));
}

template <bool kPow2>
JETRL_DEVICE void along_rows(const SiluParams& p, uint8_t* memory) {
  constexpr int kStep = SiluShape::kRowsAtOnce;
  const int thread = sm90::thread_index(), chunk = thread % SiluShape::kChunks, first = thread / SiluShape::kChunks;
  const int column = sm90::block_index() * kGroup + 8 * chunk;
  const uint64_t row = uint64_t(uint32_t(sm90::block_column() * kGroup + first)), k = uint32_t(p.k);
  const uint16_t* dy = p.dy + row * p.stride_dy + column;
  const uint16_t* gate = p.gate + row * p.stride_gate + column;
  const uint16_t* up = p.up + row * p.stride_up + column;
  uint8_t* gate_qdata = p.gradients[0].qdata + row * k + column;
  uint8_t* up_qdata = p.gradients[1].qdata + row * k + column;
  // Lane 0 of a row stores the scale of gate's gradient, lane 1 that of up's.
  float* scales = (chunk == 0 ? p.gradients[0].scales : p.gradients[1].scales) +
                  uint64_t(uint32_t(sm90::block_index())) * uint32_t(p.rows) + row;
  uint8_t* shared = memory + first * SiluShape::kRow;
  int left = p.rows - int(row);

  Operands next{};
  if (left > 0) next = {sm90::load_16(dy), sm90::load_16(gate), sm90::load_16(up)};
#pragma unroll 1
  for (int i = 0; i < SiluShape::kPasses; ++i) {
    const uint32_t d[4] = {next.dy.x, next.dy.y, next.dy.z, next.dy.w};
    const uint32_t g[4] = {next.gate.x, next.gate.y, next.gate.z, next.gate.w};
    const uint32_t u[4] = {next.up.x, next.up.y, next.up.z, next.up.w};
    next = {};
    dy += uint64_t(p.stride_dy) * kStep, gate += uint64_t(p.stride_gate) * kStep, up += uint64_t(p.stride_up) * kStep;
    if (i < SiluShape::kPasses - 1 && left > kStep) next = {sm90::load_16(dy), sm90::load_16(gate), sm90::load_16(up)};

    uint32_t of_gate[4], of_up[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const GradientPair low(low_half(d[j]), low_half(g[j]), low_half(u[j]));
      const GradientPair high(high_half(d[j]), high_half(g[j]), high_half(u[j]));
      of_gate[j] = sm90::pack_bf16(low.gate, high.gate);
      of_up[j] = sm90::pack_bf16(low.up, high.up);
    }
    uint8_t* to = shared + (chunk ^ (kStep / 16 * i + first / 16)) * SiluShape::kChunk;
    *reinterpret_cast<uint4*>(to) = uint4{of_gate[0], of_gate[1], of_gate[2], of_gate[3]};
    *reinterpret_cast<uint4*>(to + SiluShape::kMatrix) = uint4{of_up[0], of_up[1], of_up[2], of_up[3]};

    // Gate's maximum in the low half, up's in the high one.
    const uint32_t largest_gate = largest_of(of_gate), largest_up = largest_of(of_up);
    uint32_t both = sm90::larger_pair(sm90::permute_bytes(largest_gate, largest_up, 0x5410),
                                      sm90::permute_bytes(largest_gate, largest_up, 0x7632));
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) both = sm90::larger_pair(both, sm90::shuffle_xor(both, mask));
    const Bf16Divider<kPow2> divide_gate(fabsf(low_half(both))), divide_up(fabsf(high_half(both)));
    if (left > 0) {
      *reinterpret_cast<uint2*>(gate_qdata) = row_qdata(divide_gate, of_gate);
      *reinterpret_cast<uint2*>(up_qdata) = row_qdata(divide_up, of_up);
      if (chunk < 2) *scales = chunk == 0 ? divide_gate.stored : divide_up.stored;
    }
    gate_qdata += k * kStep, up_qdata += k * kStep, scales += kStep;
    shared += kStep * SiluShape::kRow, left -= kStep;
  }
}

template <bool kPow2>
JETRL_DEVICE void down_columns(const SiluParams& p, const uint8_t* memory) {
  const int thread = sm90::thread_index(), warp = thread / 32, t = thread % 32 / 4, c = thread % 4;
  const int tile_row = sm90::block_column() * kGroup;
  static_assert(SiluShape::kThreads / 32 == SiluShape::kChunks,
                "a warp has a chunk of eight columns of both gradients");
  const int column = sm90::block_index() * kGroup + 8 * warp + 2 * c;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Gradient& gradient = p.gradients[i];
    const uint8_t* from =
        memory + i * SiluShape::kMatrix + t * 16 * SiluShape::kRow + (warp ^ t) * SiluShape::kChunk + 4 * c;
    uint32_t words[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) words[j] = *reinterpret_cast<const uint32_t*>(from + SiluShape::kRow * j);
    uint32_t largest = largest_of(words);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) largest = sm90::larger_pair(largest, sm90::shuffle_xor(largest, mask));
    const Bf16Divider<kPow2> divide_low(fabsf(low_half(largest))), divide_high(fabsf(high_half(largest)));
    uint8_t* out = gradient.column_qdata + uint64_t(uint32_t(column)) * p.column_stride + tile_row + 16 * t;
    *reinterpret_cast<uint4*>(out) = uint4{low_qdata(divide_low, words), low_qdata(divide_low, words + 4),
                                           low_qdata(divide_low, words + 8), low_qdata(divide_low, words + 12)};
    *reinterpret_cast<uint4*>(out + p.column_stride) =
        uint4{high_qdata(divide_high, words), high_qdata(divide_high, words + 4), high_qdata(divide_high, words + 8),
              high_qdata(divide_high, words + 12)};
    if (t == 0) {
      float* scales = gradient.column_scales + uint64_t(uint32_t(sm90::block_column())) * uint32_t(p.k) + column;
      *reinterpret_cast<float2*>(scales) = float2{divide_low.stored, divide_high.stored};
    }
  }
}

template <bool kPow2>
JETRL_KERNEL void __launch_bounds__(SiluShape::kThreads, 2) sm90_silu_backward(JETRL_GRID_CONSTANT SiluParams p) {
  uint8_t* memory = sm90::dynamic_shared_memory();
  along_rows<kPow2>(p, memory);
  sm90::sync_block();
  down_columns<kPow2>(p, memory);
}

}  // namespace

void silu_mul_backward(const Bf16Rows& dy, const Bf16Rows& gate, const Bf16Rows& up, int rows, int k, bool pow2,
                       const QuantizedBothWays& dgate, const QuantizedBothWays& dup, Stream stream) {
  SiluParams p{dy.data,
               gate.data,
               up.data,
               {},
               uint32_t(dy.stride),
               uint32_t(gate.stride),
               uint32_t(up.stride),
               uint32_t(dgate.columns.row_stride),
               rows,
               k};
  const QuantizedBothWays* results[2] = {&dgate, &dup};
  for (int i = 0; i < 2; ++i) {
    p.gradients[i] = {static_cast<uint8_t*>(results[i]->qdata), results[i]->scales,
                      static_cast<uint8_t*>(results[i]->columns.qdata), results[i]->columns.scales};
  }
  const Grid grid{k / kGroup, 1, SiluShape::kThreads, SiluShape::kBytes, stream, false, ceil_div(rows, kGroup)};
  if (pow2) {
    launch<sm90_silu_backward<true>>(grid, p);
  } else {
    launch<sm90_silu_backward<false>>(grid, p);
  }
}

}  // namespace jetrl

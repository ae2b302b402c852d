// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The emulator's C interface: operands of reference.gemm_nt, and of the kernels that write qdata, by address.

#include "machine.h"

using namespace emulator;

// A library may have only some of the kernels.
namespace jetrl {
__attribute__((weak)) void fprop(const Operand&, const Operand&, int, const Bias&, const Output&, Config, Stream);
__attribute__((weak)) void fprop_of_ranks(const Operand&, const Operand&, int, int, const Output&, Config, Stream);
__attribute__((weak)) void decode_fprop(const Operand&, const Operand&, int, const Bias&, const Output&, Config, bool,
                                        Stream);
__attribute__((weak)) void wgrad(const Operand&, const Operand&, int, const Output&, Config, Stream);
__attribute__((weak)) void grouped_fprop(const Operand&, const ExpertOperand&, const Segments&, int, const Output&,
                                         Config, Stream);
__attribute__((weak)) void grouped_decode(const Operand&, const ExpertOperand&, const Segments&, int, const Output&,
                                          Config, bool, bool, Stream);
__attribute__((weak)) void grouped_wgrad(const Operand&, const Operand&, int, const Segments&, const Output&, Config,
                                         Stream);
__attribute__((weak)) void relayout_128x1(const Operand&, int, bool, const Transposed&, Stream);
__attribute__((weak)) void transpose_128x128(const Operand&, int, const Transposed&, Stream);
__attribute__((weak)) void silu_mul_backward(const Bf16Rows&, const Bf16Rows&, const Bf16Rows&, int, int, bool,
                                             const QuantizedBothWays&, const QuantizedBothWays&, Stream);
__attribute__((weak)) void decode_attention(const DecodeAttention&, const void*, Stream);
__attribute__((weak)) void delta_rule(const DeltaRule&, Stream);
__attribute__((weak)) void decode_attention_bf16(const DecodeAttention&, const Bf16Pages&, Stream);
}  // namespace jetrl

namespace {

// Frees a cluster's stacks and accesses, some 30 MB: each library has its own machine, one for every planted fault.
struct ACall {
  ~ACall() {
    machine.blocks.clear(), machine.fibers.clear(), machine.tiles.clear(), machine.accesses.clear();
    machine.accesses.shrink_to_fit();
    machine.given.clear();
  }
};

// 0, or 1 with the reason in jetrl_error.
template <class Call>
int guarded(uint32_t seed, const Call& call) {
  const ACall freed{};
  machine.seed = seed;
  machine.steps = 0;
  machine.fresh.clear();
  machine.counted_rows = 1 << 30;
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    machine.error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* jetrl_error() { return machine.error.c_str(); }

uint64_t jetrl_steps() { return machine.steps; }

int jetrl_blocks() { return machine.grid; }

void jetrl_set_multiprocessors(int count) { machine.multiprocessors = count; }

// Of the next calls by torch's operators.
void jetrl_set_seed(uint32_t seed) { machine.seed = seed; }

// kernel: 0 fprop, 1 decode, 2 wgrad, 3 fprop_of_ranks (`ranks`). Returns 0, or 1 with the reason in jetrl_error.
int jetrl_run(int kernel, int m, int n, int k, const void* a, int64_t a_stride, const float* a_scales, int64_t a_row,
              int64_t a_group, const void* b, int64_t b_stride, const float* b_scales, int64_t b_row, int64_t b_group,
              const void* bias, int bias_fp32, void* out, int64_t out_stride, int out_fp32, int ranks,
              int block, int cluster, int multiprocessors, uint32_t seed) {
  machine.multiprocessors = multiprocessors;
  const jetrl::Operand of_a{a, m, a_stride, {a_scales, a_row, a_group}};
  const jetrl::Operand of_b{b, n, b_stride, {b_scales, b_row, b_group}};
  const jetrl::Output of_out{out, out_stride, out_fp32 != 0};
  const jetrl::Bias of_bias{bias, bias_fp32 != 0};
  const jetrl::Config config{block, cluster};
  return guarded(seed, [&] {
    if (kernel == 0) {
      jetrl::fprop(of_a, of_b, k, of_bias, of_out, config, nullptr);
    } else if (kernel == 1) {
      const int64_t last_scale = (m - 1) * a_row + (jetrl::ceil_div(k, jetrl::kGroup) - 1) * a_group;
      if (m <= 64) machine.counted_rows = m;  // rows after a smaller tile are arbitrary
      machine.fresh = {{a, static_cast<const uint8_t*>(a) + m * a_stride}, {a_scales, a_scales + last_scale + 1}};
      jetrl::decode_fprop(of_a, of_b, k, of_bias, of_out, config, true, nullptr);
    } else if (kernel == 3) {
      jetrl::fprop_of_ranks(of_a, of_b, k, ranks, of_out, config, nullptr);
    } else {
      jetrl::wgrad(of_a, of_b, k, of_out, config, nullptr);
    }
  });
}

// kernel: 0 grouped_fprop, 1 grouped_decode: x [rows, k] times w [experts, n, k], the latter's strides those of a tensor,
// to out [slices * rows, n]. The previous kernel writes x, and `start` without `static_segments`.
int jetrl_run_grouped(int kernel, int rows, int experts, int n, int k, const void* x, int64_t x_stride,
                      const float* x_scales, int64_t x_row, int64_t x_group, const void* w, int64_t w_expert,
                      int64_t w_row, const float* w_scales, int64_t w_scale_expert, int64_t w_scale_row,
                      int64_t w_scale_group, const int* start, int aligned, int slices, int static_segments,
                      void* out, int64_t out_stride, int block, int cluster, int multiprocessors, uint32_t seed) {
  machine.multiprocessors = multiprocessors;
  const jetrl::Operand of_x{x, rows, x_stride, {x_scales, x_row, x_group}};
  const jetrl::ExpertOperand of_w = jetrl::expert_operand(w, experts, n, k, w_expert, w_row,
                                                          {w_scales, w_scale_row, w_scale_group}, w_scale_expert);
  const jetrl::Segments segments{start, experts, aligned != 0};
  const jetrl::Output of_out{out, out_stride, false};
  return guarded(seed, [&] {
    if (kernel == 0) {
      jetrl::grouped_fprop(of_x, of_w, segments, slices, of_out, {block, cluster}, nullptr);
    } else {
      const int64_t last_scale = (rows - 1) * x_row + (k / jetrl::kGroup - 1) * x_group;
      machine.fresh = {{x, static_cast<const uint8_t*>(x) + rows * x_stride}, {x_scales, x_scales + last_scale + 1}};
      if (!static_segments) machine.fresh.push_back({start, start + experts + 1});
      jetrl::grouped_decode(of_x, of_w, segments, slices, of_out, {block, cluster}, true, static_segments != 0, nullptr);
    }
  });
}

// a [n, t] and b [k, t] to out [experts * n, k].
int jetrl_run_grouped_wgrad(int experts, int n, int k, int t, const void* a, int64_t a_stride, const float* a_scales,
                            int64_t a_row, int64_t a_group, const void* b, int64_t b_stride, const float* b_scales,
                            int64_t b_row, int64_t b_group, const int* start, void* out, int64_t out_stride, int block,
                            int cluster, int multiprocessors, uint32_t seed) {
  machine.multiprocessors = multiprocessors;
  return guarded(seed, [&] {
    jetrl::grouped_wgrad({a, n, a_stride, {a_scales, a_row, a_group}}, {b, k, b_stride, {b_scales, b_row, b_group}}, t,
                         {start, experts}, {out, out_stride, false}, {block, cluster}, nullptr);
  });
}

// rule: 0 fp32, 1 pow2: the re-layout of x [m, k]; -1: the transpose of a weight's qdata and scales.
int jetrl_transpose(int rule, int m, int k, const void* qdata, int64_t stride, const float* scales, int64_t scale_row,
                    int64_t scale_group, void* out, int64_t out_stride, float* out_scales, uint32_t seed) {
  const jetrl::Operand of{qdata, m, stride, {scales, scale_row, scale_group}};
  const jetrl::Transposed to{out, out_stride, out_scales};
  return guarded(seed, [&] {
    if (rule < 0) {
      jetrl::transpose_128x128(of, k, to, nullptr);
    } else {
      jetrl::relayout_128x1(of, k, rule == 1, to, nullptr);
    }
  });
}

// dy, gate, up: BF16 [rows, k] and their strides in elements. results: qdata and scales of the rows, of the columns, of
// gate's gradient, then of up's.
int jetrl_silu_mul_backward(int pow2, int rows, int k, const uint16_t* dy, int64_t dy_stride, const uint16_t* gate,
                            int64_t gate_stride, const uint16_t* up, int64_t up_stride, void* const* results,
                            int64_t column_stride, uint32_t seed) {
  const auto gradient = [=](void* const* of) {
    return jetrl::QuantizedBothWays{
        of[0], static_cast<float*>(of[1]), {of[2], column_stride, static_cast<float*>(of[3])}};
  };
  return guarded(seed, [&] {
    jetrl::silu_mul_backward({dy, dy_stride}, {gate, gate_stride}, {up, up_stride}, rows, k, pow2 != 0,
                             gradient(results), gradient(results + 4), nullptr);
  });
}

// jetrl::DecodeAttention's members in its order. The cache: FP8 pages, or BF16 keys with values and their strides.
// Until the end of the next call copies may read these bytes, and others only if they are given too.
void jetrl_give(const uint8_t* from, int64_t bytes) { machine.given.push_back({from, from + bytes}); }

int jetrl_decode_attention(const void* cache, const uint8_t* values, const int* strides, const uint16_t* q,
                           uint16_t* out, const int32_t* lengths, const int32_t* table, int64_t stride_q,
                           int64_t stride_out, int64_t stride_table, int requests, int kv_heads, int group, int units,
                           float scale, int cluster, int multiprocessors, uint32_t seed) {
  machine.multiprocessors = multiprocessors;
  const jetrl::DecodeAttention call{q,        out,      lengths, table, stride_q, stride_out, stride_table,
                                    requests, kv_heads, group,   units, scale,    cluster};
  return guarded(seed, [&] {
    if (values == nullptr) {
      jetrl::decode_attention(call, cache, nullptr);
    } else {
      const uint8_t* keys = static_cast<const uint8_t*>(cache);
      jetrl::decode_attention_bf16(call, {keys, values, strides[0], strides[1], strides[2]}, nullptr);
    }
  });
}
}

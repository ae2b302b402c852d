// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The kernels as torch operators, through torch's stable ABI only: one build runs with every Python and later torch.
//
// Operators write into a tensor of the caller and never wait for the device, so CUDA graphs can capture them. Calls are
// checked again after jetrl_verl/kernels/, because a wrong stride would read other memory without an error. Under
// tests/emulator the same operators accept CPU tensors.

#ifndef JETRL_EMULATE
#include <torch/csrc/stable/accelerator.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "gemm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef JETRL_EMULATE
#define JETRL_DISPATCH_KEY CPU

bool on_device(const Tensor& tensor) { return tensor.is_cpu(); }

struct Device {
  jetrl::Stream stream = nullptr;

  explicit Device(const Tensor&) {}
};

#else
#define JETRL_DISPATCH_KEY CUDA

bool on_device(const Tensor& tensor) { return tensor.is_cuda(); }

// Makes the device of `tensor` current while this lives; kernels run in its current stream.
struct Device {
  torch::stable::accelerator::DeviceGuard guard;
  jetrl::Stream stream = nullptr;

  explicit Device(const Tensor& tensor) : guard(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  }
};

#endif  // JETRL_EMULATE

bool starts_on_16_bytes(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0; }

int narrow(int64_t value) {
  STD_TORCH_CHECK(value >= 1 && value <= std::numeric_limits<int>::max() - 1024, "jetrl_native: a dimension of ", value,
                  " is not supported. Use another backend, which accepts empty and larger ones.");
  return int(value);
}

// FP8 data [rows, k] E4M3 with FP32 scales [scale_rows, ceil(k / 128)] of any strides.
jetrl::Operand operand(const char* name, const Tensor& qdata, const Tensor& scales, int scale_block) {
  STD_TORCH_CHECK(on_device(qdata) && qdata.dim() == 2 && qdata.scalar_type() == ScalarType::Float8_e4m3fn,
                  "jetrl_native: the qdata of ", name, " must be a 2-d float8_e4m3fn tensor on a GPU.");
  STD_TORCH_CHECK(qdata.stride(1) == 1 && qdata.stride(0) % 16 == 0 && qdata.stride(0) >= qdata.size(1) &&
                      starts_on_16_bytes(qdata),
                  "jetrl_native: the rows of ", name,
                  " must be contiguous and start on multiples of 16 bytes; pad them.");
  const int64_t scale_rows = (qdata.size(0) + scale_block - 1) / scale_block;
  const int64_t groups = (qdata.size(1) + jetrl::kGroup - 1) / jetrl::kGroup;
  STD_TORCH_CHECK(on_device(scales) && scales.dim() == 2 && scales.scalar_type() == ScalarType::Float &&
                      scales.size(0) == scale_rows && scales.size(1) == groups,
                  "jetrl_native: the scales of ", name, " must be FP32, one per ", scale_block, " x 128 qdata.");
  return {qdata.data_ptr(), narrow(qdata.size(0)), qdata.stride(0),
          {static_cast<const float*>(scales.data_ptr()), scales.stride(0), scales.stride(1)}};
}

jetrl::Output output(const Tensor& out, int rows, int columns) {
  const bool fp32 = out.scalar_type() == ScalarType::Float;
  const int64_t element = fp32 ? 4 : 2;
  STD_TORCH_CHECK(on_device(out) && out.dim() == 2 && (fp32 || out.scalar_type() == ScalarType::BFloat16) &&
                      out.size(0) == rows && out.size(1) == columns,
                  "jetrl_native: the output must be a BF16 or FP32 tensor of ", rows, " x ", columns, ".");
  STD_TORCH_CHECK(out.stride(1) == 1 && out.stride(0) * element % 16 == 0 && columns * element % 16 == 0 &&
                      (rows == 1 || out.stride(0) >= columns) && starts_on_16_bytes(out),
                  "jetrl_native: rows of the output must be contiguous multiples of 16 bytes that do not overlap; pad "
                  "them.");
  return {out.data_ptr(), out.stride(0), fp32};
}

jetrl::Bias bias_of(const std::optional<Tensor>& bias, int columns) {
  if (!bias.has_value()) return {nullptr, false};
  const bool fp32 = bias->scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(on_device(*bias) && bias->dim() == 1 && bias->size(0) == columns && bias->stride(0) == 1 &&
                      (fp32 || bias->scalar_type() == ScalarType::BFloat16),
                  "jetrl_native: the bias must be ", columns, " contiguous BF16 or FP32 values on the GPU.");
  return {bias->data_ptr(), fp32};
}

int contracted(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.size(1) == b.size(1), "jetrl_native: the operands contract ", a.size(1), " and ", b.size(1),
                  " elements; they must be equal.");
  return narrow(a.size(1));
}

jetrl::Config config_of(int64_t block, int64_t cluster) { return {int(block), int(cluster)}; }

// The checked operands of both forward kernels.
struct Forward {
  int k;
  jetrl::Operand x, w;
  jetrl::Bias bias;
  jetrl::Output y;
  jetrl::Config config;

  Forward(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales,
          const std::optional<Tensor>& bias, const Tensor& y, int64_t block, int64_t cluster)
      : k(contracted(x, w)),
        x(operand("X", x, x_scales, 1)),
        w(operand("W", w, w_scales, jetrl::kGroup)),
        bias(bias_of(bias, this->w.rows)),
        y(output(y, this->x.rows, this->w.rows)),
        config(config_of(block, cluster)) {
    STD_TORCH_CHECK(!this->y.fp32, "jetrl_native: FProp writes BF16; pass an output of BF16.");
  }
};

void fprop(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales,
           const std::optional<Tensor>& bias, const Tensor& y, int64_t block, int64_t cluster) {
  const Device device(x);
  const Forward call(x, x_scales, w, w_scales, bias, y, block, cluster);
  jetrl::fprop(call.x, call.w, call.k, call.bias, call.y, call.config, device.stream);
}

void fprop_of_ranks(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales, int64_t ranks,
                    const Tensor& y, int64_t block, int64_t cluster) {
  const Device device(x);
  const Forward call(x, x_scales, w, w_scales, std::nullopt, y, block, cluster);
  jetrl::fprop_of_ranks(call.x, call.w, call.k, narrow(ranks), call.y, call.config, device.stream);
}

void decode(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales,
            const std::optional<Tensor>& bias, const Tensor& y, int64_t block, int64_t cluster, bool static_weight) {
  const Device device(x);
  const Forward call(x, x_scales, w, w_scales, bias, y, block, cluster);
  jetrl::decode_fprop(call.x, call.w, call.k, call.bias, call.y, call.config, static_weight, device.stream);
}

void wgrad(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales, const Tensor& dw,
           int64_t block, int64_t cluster) {
  const Device device(a);
  const int t = contracted(a, b);
  const jetrl::Operand of_a = operand("dY^T", a, a_scales, 1), of_b = operand("X^T", b, b_scales, 1);
  const jetrl::Output of_dw = output(dw, of_a.rows, of_b.rows);
  jetrl::wgrad(of_a, of_b, t, of_dw, config_of(block, cluster), device.stream);
}

// The first row of each expert, [experts + 1]; `aligned`: multiples of 4.
jetrl::Segments segments(const Tensor& start, bool aligned) {
  STD_TORCH_CHECK(on_device(start) && start.dim() == 1 && start.scalar_type() == ScalarType::Int && start.stride(0) == 1,
                  "jetrl_native: the experts' first rows must be contiguous int32 values on a GPU.");
  return {static_cast<const int*>(start.data_ptr()), narrow(start.size(0) - 1), aligned};
}

// FP8 data [experts, n, k] E4M3 with FP32 scales [experts, n / 128, k / 128] of any strides.
jetrl::ExpertOperand experts_operand(const Tensor& qdata, const Tensor& scales, int experts) {
  STD_TORCH_CHECK(on_device(qdata) && qdata.dim() == 3 && qdata.scalar_type() == ScalarType::Float8_e4m3fn &&
                      qdata.size(0) == experts,
                  "jetrl_native: the qdata of W must be a float8_e4m3fn tensor of ", experts, " matrices on a GPU.");
  const int64_t n = qdata.size(1), k = qdata.size(2);
  STD_TORCH_CHECK(n % jetrl::kGroup == 0 && k % jetrl::kGroup == 0, "jetrl_native: experts of ", n, " x ", k,
                  " are not whole blocks of 128 x 128; use backend triton.");
  STD_TORCH_CHECK(qdata.stride(2) == 1 && qdata.stride(1) % 16 == 0 && qdata.stride(1) >= k &&
                      starts_on_16_bytes(qdata),
                  "jetrl_native: the rows of W must be contiguous and start on multiples of 16 bytes; pad them.");
  STD_TORCH_CHECK(on_device(scales) && scales.dim() == 3 && scales.scalar_type() == ScalarType::Float &&
                      scales.size(0) == experts && scales.size(1) == n / jetrl::kGroup &&
                      scales.size(2) == k / jetrl::kGroup,
                  "jetrl_native: the scales of W must be FP32, one per 128 x 128 qdata.");
  const jetrl::Scales of_first{static_cast<const float*>(scales.data_ptr()), scales.stride(1), scales.stride(2)};
  const jetrl::ExpertOperand w = jetrl::expert_operand(qdata.data_ptr(), experts, narrow(n), narrow(k), qdata.stride(0),
                                                       qdata.stride(1), of_first, scales.stride(0));
  STD_TORCH_CHECK(w.all.qdata != nullptr,
                  "jetrl_native: experts must lie below each other in one matrix, or next to each other; make them "
                  "contiguous.");
  narrow(experts * std::max(qdata.stride(0) / qdata.stride(1), n)), narrow(experts * k);
  return w;
}

// `more`: further arguments of the kernel, before the stream.
template <class Run, class... More>
void grouped_forward(Run* run, const Tensor& x, const Tensor& x_scales, const Tensor& w,
                     const Tensor& w_scales, const Tensor& start, bool aligned, int64_t slices, const Tensor& y,
                     int64_t block, int64_t cluster, More... more) {
  const Device device(x);
  const jetrl::Segments of = segments(start, aligned);
  const jetrl::ExpertOperand of_w = experts_operand(w, w_scales, of.experts);
  STD_TORCH_CHECK(of_w.k == x.size(1), "jetrl_native: the operands contract ", x.size(1), " and ", of_w.k,
                  " elements; they must be equal.");
  const jetrl::Operand of_x = operand("X", x, x_scales, 1);
  const jetrl::Output of_y = output(y, narrow(narrow(slices) * int64_t(of_x.rows)), of_w.n);
  STD_TORCH_CHECK(!of_y.fp32, "jetrl_native: FProp writes BF16; pass an output of BF16.");
  run(of_x, of_w, of, int(slices), of_y, config_of(block, cluster), more..., device.stream);
}

void grouped_fprop(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales,
                   const Tensor& start, bool aligned, int64_t slices, const Tensor& y, int64_t block,
                   int64_t cluster) {
  grouped_forward(jetrl::grouped_fprop, x, x_scales, w, w_scales, start, aligned, slices, y, block, cluster);
}

void grouped_decode(const Tensor& x, const Tensor& x_scales, const Tensor& w, const Tensor& w_scales,
                    const Tensor& start, bool aligned, int64_t slices, const Tensor& y, int64_t block,
                    int64_t cluster, bool static_weight, bool static_segments) {
  grouped_forward(jetrl::grouped_decode, x, x_scales, w, w_scales, start, aligned, slices, y, block, cluster,
                  static_weight, static_segments);
}

void grouped_wgrad(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
                   const Tensor& start, const Tensor& dw, int64_t block, int64_t cluster) {
  const Device device(a);
  const jetrl::Segments of = segments(start, true);
  const int t = contracted(a, b);
  STD_TORCH_CHECK(t % jetrl::kGroup == 0, "jetrl_native: experts' tokens must be whole groups of 128, not ", t,
                  "; pad each expert's.");
  const jetrl::Operand of_a = operand("dY^T", a, a_scales, 1), of_b = operand("X^T", b, b_scales, 1);
  const int64_t rows = narrow(int64_t(of.experts) * of_a.rows);
  STD_TORCH_CHECK(on_device(dw) && dw.dim() == 3 && dw.scalar_type() == ScalarType::BFloat16 &&
                      dw.size(0) == of.experts && dw.size(1) == of_a.rows && dw.size(2) == of_b.rows &&
                      dw.stride(2) == 1 && dw.stride(1) == of_b.rows && dw.stride(0) == of_a.rows * dw.stride(1) &&
                      of_b.rows % 8 == 0 && starts_on_16_bytes(dw),
                  "jetrl_native: the output must be ", rows, " contiguous BF16 rows of ", of_b.rows,
                  ", each a multiple of 16 bytes.");
  jetrl::grouped_wgrad(of_a, of_b, t, of, {dw.data_ptr(), of_b.rows, false}, config_of(block, cluster),
                       device.stream);
}

// A stride that fits into 32 bits, as the kernels store it.
int64_t short_stride(int64_t stride) {
  STD_TORCH_CHECK(stride <= std::numeric_limits<int>::max(), "jetrl_native: a stride of ", stride,
                  " is not supported. Use backend triton.");
  return stride;
}

jetrl::Operand transposable(const Tensor& qdata, const Tensor& scales, int scale_block) {
  const jetrl::Operand result = operand("X", qdata, scales, scale_block);
  STD_TORCH_CHECK(qdata.size(1) % 16 == 0, "jetrl_native: rows of qdata must be multiples of 16 bytes; use backend "
                  "triton.");
  short_stride(result.row_stride), short_stride(result.scales.stride_row);
  return result;
}

// `tensor` is [rows, columns] without gaps.
void check_dense(const char* name, const Tensor& tensor, ScalarType type, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(on_device(tensor) && tensor.dim() == 2 && tensor.scalar_type() == type && tensor.size(0) == rows &&
                      tensor.size(1) == columns && tensor.stride(0) == columns && tensor.stride(1) == 1 &&
                      starts_on_16_bytes(tensor),
                  "jetrl_native: ", name, " must be ", rows, " x ", columns, " contiguous ",
                  type == ScalarType::Byte ? "bytes" : "FP32 values", " that start on a multiple of 16 bytes.");
}

// FP8 data of a transpose [columns, bytes] and its scales [scale_rows, scale_columns].
jetrl::Transposed transposed(const Tensor& out, const Tensor& scales, int64_t columns, int64_t bytes,
                             int64_t scale_rows, int64_t scale_columns) {
  STD_TORCH_CHECK(bytes % 16 == 0, "jetrl_native: rows of the transpose must be multiples of 16 bytes; use backend "
                  "triton.");
  check_dense("the transpose", out, ScalarType::Byte, columns, bytes);
  check_dense("the scales of the transpose", scales, ScalarType::Float, scale_rows, scale_columns);
  return {out.data_ptr(), short_stride(bytes), static_cast<float*>(scales.data_ptr())};
}

void relayout(const Tensor& qdata, const Tensor& scales, const Tensor& out, const Tensor& out_scales, bool pow2) {
  const Device device(qdata);
  const jetrl::Operand x = transposable(qdata, scales, 1);
  const int k = narrow(qdata.size(1)), groups = jetrl::ceil_div(x.rows, jetrl::kGroup);
  const jetrl::Transposed to = transposed(out, out_scales, k, int64_t(groups) * jetrl::kGroup, groups, k);
  jetrl::relayout_128x1(x, k, pow2, to, device.stream);
}

void transpose(const Tensor& qdata, const Tensor& scales, const Tensor& out, const Tensor& out_scales) {
  const Device device(qdata);
  const jetrl::Operand w = transposable(qdata, scales, jetrl::kGroup);
  const int k = narrow(qdata.size(1));
  const jetrl::Transposed to = transposed(out, out_scales, k, w.rows, scales.size(1), scales.size(0));
  jetrl::transpose_128x128(w, k, to, device.stream);
}

jetrl::Bf16Rows bf16_rows(const char* name, const Tensor& x, int64_t rows, int64_t k) {
  STD_TORCH_CHECK(on_device(x) && x.dim() == 2 && x.scalar_type() == ScalarType::BFloat16 && x.size(0) == rows &&
                      x.size(1) == k,
                  "jetrl_native: ", name, " must be BF16, ", rows, " x ", k, ", on a GPU.");
  STD_TORCH_CHECK(x.stride(1) == 1 && x.stride(0) % 8 == 0 && starts_on_16_bytes(x),
                  "jetrl_native: rows of ", name, " must be contiguous and start on multiples of 16 bytes; pad "
                  "them.");
  return {static_cast<const uint16_t*>(x.data_ptr()), short_stride(x.stride(0))};
}

// FP8 data [rows, k] with scales [k / 128, rows], and the operands of `transposed`.
jetrl::QuantizedBothWays both_ways(const Tensor& qdata, const Tensor& scales, const Tensor& column_qdata,
                                   const Tensor& column_scales, int rows, int k) {
  const int groups = jetrl::ceil_div(rows, jetrl::kGroup);
  check_dense("the qdata of a gradient", qdata, ScalarType::Byte, rows, k);
  check_dense("the scales of a gradient", scales, ScalarType::Float, k / jetrl::kGroup, rows);
  return {qdata.data_ptr(), static_cast<float*>(scales.data_ptr()),
          transposed(column_qdata, column_scales, k, int64_t(groups) * jetrl::kGroup, groups, k)};
}

void silu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up, const Tensor& dgate,
                       const Tensor& dgate_scales, const Tensor& dgate_columns, const Tensor& dgate_column_scales,
                       const Tensor& dup, const Tensor& dup_scales, const Tensor& dup_columns,
                       const Tensor& dup_column_scales, bool pow2) {
  const Device device(dy);
  const int rows = narrow(dy.size(0)), k = narrow(dy.size(1));
  STD_TORCH_CHECK(k % jetrl::kGroup == 0, "jetrl_native: gradients of ", k,
                  " columns are not whole groups of 128; use backend triton.");
  jetrl::silu_mul_backward(bf16_rows("dY", dy, rows, k), bf16_rows("gate", gate, rows, k), bf16_rows("up", up, rows, k),
                           rows, k, pow2, both_ways(dgate, dgate_scales, dgate_columns, dgate_column_scales, rows, k),
                           both_ways(dup, dup_scales, dup_columns, dup_column_scales, rows, k), device.stream);
}

void check_decode_rows(const Tensor& q, const Tensor& out) {
  for (const Tensor* rows : {&q, &out}) {
    STD_TORCH_CHECK(on_device(*rows) && rows->dim() == 3 && rows->scalar_type() == ScalarType::BFloat16 &&
                        rows->size(0) == q.size(0) && rows->size(1) == q.size(1) && rows->size(2) == 128 &&
                        rows->stride(2) == 1 && rows->stride(1) == 128 && rows->stride(0) % 8 == 0 &&
                        starts_on_16_bytes(*rows),
                    "jetrl_native: queries and results must be BF16 [requests, heads, 128] on a GPU, the heads of a "
                    "request next to each other, requests on multiples of 16 bytes; make them contiguous.");
  }
}

jetrl::DecodeAttention decode_call(const Tensor& q, const Tensor& out, const Tensor& lengths, const Tensor& block_table,
                                   int64_t kv_heads, int64_t units, double scale, int64_t cluster) {
  const int64_t heads = q.size(1);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "jetrl_native: ", heads, " query heads over ", kv_heads,
                  " KV heads are not supported. Use as many for each KV head.");
  STD_TORCH_CHECK(on_device(lengths) && lengths.dim() == 1 && lengths.scalar_type() == ScalarType::Int &&
                      lengths.size(0) >= q.size(0) && lengths.stride(0) == 1,
                  "jetrl_native: lengths must be int32, one of each request.");
  STD_TORCH_CHECK(on_device(block_table) && block_table.dim() == 2 && block_table.scalar_type() == ScalarType::Int &&
                      block_table.size(0) >= q.size(0) && block_table.stride(1) == 1,
                  "jetrl_native: the block table must be int32 [requests, pages], rows contiguous.");
  return {static_cast<const uint16_t*>(q.data_ptr()),
          static_cast<uint16_t*>(out.data_ptr()),
          static_cast<const int32_t*>(lengths.data_ptr()),
          static_cast<const int32_t*>(block_table.data_ptr()),
          q.stride(0),
          out.stride(0),
          block_table.stride(0),
          narrow(q.size(0)),
          narrow(kv_heads),
          int(heads / kv_heads),
          narrow(units),
          float(scale),
          narrow(cluster)};
}

void decode_attention(const Tensor& q, const Tensor& cache, const Tensor& lengths, const Tensor& block_table,
                      double scale, int64_t units, const Tensor& out, int64_t cluster) {
  const Device device(q);
  constexpr int64_t kUnit = 4128;
  check_decode_rows(q, out);
  STD_TORCH_CHECK(on_device(cache) && cache.dim() == 4 && cache.scalar_type() == ScalarType::Byte &&
                      cache.size(2) == units && cache.size(3) == kUnit && cache.is_contiguous() &&
                      starts_on_16_bytes(cache),
                  "jetrl_native: the cache must be contiguous bytes [pages, KV heads, units, 4128] on a GPU.");
  const jetrl::DecodeAttention call =
      decode_call(q, out, lengths, block_table, cache.size(1), units, scale, cluster);
  jetrl::decode_attention(call, cache.data_ptr(), device.stream);
}

void decode_attention_bf16(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                           const Tensor& block_table, double scale, const Tensor& out, int64_t cluster) {
  const Device device(q);
  check_decode_rows(q, out);
  for (const Tensor* pages : {&keys, &values}) {
    STD_TORCH_CHECK(on_device(*pages) && pages->dim() == 4 && pages->scalar_type() == ScalarType::BFloat16 &&
                        pages->size(3) == 128 && pages->stride(3) == 1 && pages->size(1) % 16 == 0 &&
                        starts_on_16_bytes(*pages),
                    "jetrl_native: keys and values must be BF16 [pages, tokens, KV heads, 128] on a GPU, pages of a "
                    "multiple of 16 tokens.");
    for (int dim = 0; dim < 3; ++dim) {
      STD_TORCH_CHECK(pages->size(dim) == keys.size(dim) && pages->stride(dim) == keys.stride(dim) &&
                          (pages->stride(dim) % 8 == 0 || pages->size(dim) == 1),
                      "jetrl_native: keys and values must have the same shape and strides, multiples of 16 bytes; use "
                      "backend flash_attention_3.");
      STD_TORCH_CHECK(pages->size(dim) * pages->stride(dim) / 8 <= std::numeric_limits<int>::max(),
                      "jetrl_native: pages over more than 32 GiB are not supported. Use backend flash_attention_3.");
    }
  }
  const jetrl::DecodeAttention call =
      decode_call(q, out, lengths, block_table, keys.size(2), keys.size(1) / 16, scale, cluster);
  const jetrl::Bf16Pages pages{static_cast<const uint8_t*>(keys.data_ptr()),
                               static_cast<const uint8_t*>(values.data_ptr()), int(keys.stride(0) / 8),
                               int(keys.stride(1) / 8), int(keys.stride(2) / 8)};
  jetrl::decode_attention_bf16(call, pages, device.stream);
}

// Vectors are read one element at a time, anything else 16 bytes at a time.
template <class Element>
Element* contiguous(const char* name, const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape) {
  bool fits = on_device(tensor) && tensor.scalar_type() == type && tensor.dim() == int64_t(shape.size()) &&
              tensor.is_contiguous() && (tensor.dim() == 1 || starts_on_16_bytes(tensor));
  int dimension = 0;
  for (const int64_t size : shape) fits = fits && tensor.size(dimension++) == size;
  STD_TORCH_CHECK(fits, "jetrl_native: ", name, " of a delta rule has another type, shape or place than the kernel "
                  "reads; see csrc/gemm.h.");
  return static_cast<Element*>(tensor.data_ptr());
}

int64_t rows_of_heads(const char* name, const Tensor& rows, int64_t tokens, int64_t heads) {
  STD_TORCH_CHECK(on_device(rows) && rows.scalar_type() == ScalarType::Float && rows.dim() == 2 &&
                      rows.size(0) == tokens && rows.size(1) == heads && (heads == 1 || rows.stride(1) == 1),
                  "jetrl_native: ", name, " of a delta rule must be FP32, a number for each token and value head.");
  return rows.stride(0);
}

void delta_rule(const Tensor& qkv, const Tensor& b, const Tensor& a, const Tensor& a_log, const Tensor& dt_bias,
                const std::optional<Tensor>& states, const std::optional<Tensor>& slots,
                const std::optional<Tensor>& computed, const Tensor& cu_seqlens, const Tensor& out) {
  const Device device(qkv);
  constexpr int64_t kHead = 128, kStateRows = 193;
  STD_TORCH_CHECK(qkv.dim() == 2 && b.dim() == 2 && cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                  "jetrl_native: a delta rule has qkv and b of two dimensions, and boundaries of sequences.");
  const int64_t tokens = qkv.size(0), heads = b.size(1), keys = (qkv.size(1) / kHead - heads) / 2;
  const int64_t sequences = cu_seqlens.size(0) - 1;
  STD_TORCH_CHECK(heads > 0 && keys > 0 && qkv.size(1) == (2 * keys + heads) * kHead && heads % keys == 0,
                  "jetrl_native: qkv of a delta rule must have heads of 128, as many values for each key.");
  jetrl::DeltaRule call{contiguous<const uint16_t>("qkv", qkv, ScalarType::BFloat16, {tokens, qkv.size(1)}),
                        static_cast<const float*>(b.data_ptr()),
                        static_cast<const float*>(a.data_ptr()),
                        contiguous<const float>("a_log", a_log, ScalarType::Float, {heads}),
                        contiguous<const uint16_t>("dt_bias", dt_bias, ScalarType::BFloat16, {heads}),
                        nullptr,
                        nullptr,
                        nullptr,
                        contiguous<const int32_t>("cu_seqlens", cu_seqlens, ScalarType::Int, {sequences + 1}),
                        contiguous<uint16_t>("out", out, ScalarType::BFloat16, {tokens, heads, kHead}),
                        rows_of_heads("b", b, tokens, heads),
                        rows_of_heads("a", a, tokens, heads),
                        0,
                        0,
                        narrow(tokens),
                        int(sequences),
                        narrow(keys),
                        narrow(heads)};
  narrow((sequences + 1) * heads * 2);  // blocks
  if (states.has_value()) {
    STD_TORCH_CHECK(on_device(*states) && states->dim() == 4 && states->scalar_type() == ScalarType::Float &&
                        states->size(1) == heads && states->size(2) == kStateRows && states->size(3) == kHead &&
                        states->stride(3) == 1 && states->stride(2) == kHead && states->stride(1) % 4 == 0 &&
                        states->stride(0) % 4 == 0 && starts_on_16_bytes(*states),
                    "jetrl_native: states of a delta rule must be FP32 [slots, heads, 193, 128], each head's contiguous "
                    "and on a multiple of 16 bytes.");
    STD_TORCH_CHECK(slots.has_value() && computed.has_value(), "jetrl_native: states need slots and computed tokens.");
    call.states = static_cast<float*>(states->data_ptr());
    call.stride_slot = states->stride(0), call.stride_head = states->stride(1);
    call.slots = contiguous<const int32_t>("slots", *slots, ScalarType::Int, {sequences});
    call.computed = contiguous<const int32_t>("computed", *computed, ScalarType::Int, {sequences});
  }
  jetrl::delta_rule(call, device.stream);
}

void declare(torch::stable::detail::StableLibrary& library) {
  const char* forward_schema =
      "(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor? bias, Tensor(a!) y, int block, int cluster";
  library.def(("fprop" + std::string(forward_schema) + ") -> ()").c_str());
  library.def(
      "fprop_of_ranks(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, int ranks, Tensor(a!) y, int block, "
      "int cluster) -> ()");
  library.def(("decode" + std::string(forward_schema) + ", bool static_weight=False) -> ()").c_str());
  library.def(
      "wgrad(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor(a!) dw, int block, int cluster) -> ()");
  const std::string grouped_schema =
      "(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor start, bool aligned, int slices, Tensor(a!) y, "
      "int block, int cluster";
  library.def(("grouped_fprop" + grouped_schema + ") -> ()").c_str());
  library.def(
      ("grouped_decode" + grouped_schema + ", bool static_weight=False, bool static_segments=False) -> ()").c_str());
  library.def(
      "grouped_wgrad(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor start, Tensor(a!) dw, int block, "
      "int cluster) -> ()");
  library.def("relayout(Tensor qdata, Tensor scales, Tensor(a!) out, Tensor(b!) out_scales, bool pow2) -> ()");
  library.def("transpose(Tensor qdata, Tensor scales, Tensor(a!) out, Tensor(b!) out_scales) -> ()");
  library.def(
      "decode_attention(Tensor q, Tensor cache, Tensor lengths, Tensor block_table, float scale, int units, "
      "Tensor(a!) out, int cluster) -> ()");
  library.def(
      "decode_attention_bf16(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor block_table, float scale, "
      "Tensor(a!) out, int cluster) -> ()");
  library.def(
      "delta_rule(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, Tensor(a!)? states, Tensor? slots, "
      "Tensor? computed, Tensor cu_seqlens, Tensor(b!) out) -> ()");
  library.def(
      "silu_mul_backward(Tensor dy, Tensor gate, Tensor up, Tensor(a!) dgate, Tensor(b!) dgate_scales, "
      "Tensor(c!) dgate_columns, Tensor(d!) dgate_column_scales, Tensor(e!) dup, Tensor(f!) dup_scales, "
      "Tensor(g!) dup_columns, Tensor(h!) dup_column_scales, bool pow2) -> ()");
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("fprop", TORCH_BOX(&fprop));
  library.impl("fprop_of_ranks", TORCH_BOX(&fprop_of_ranks));
  library.impl("decode", TORCH_BOX(&decode));
  library.impl("wgrad", TORCH_BOX(&wgrad));
  library.impl("grouped_fprop", TORCH_BOX(&grouped_fprop));
  library.impl("grouped_decode", TORCH_BOX(&grouped_decode));
  library.impl("grouped_wgrad", TORCH_BOX(&grouped_wgrad));
  library.impl("relayout", TORCH_BOX(&relayout));
  library.impl("transpose", TORCH_BOX(&transpose));
  library.impl("silu_mul_backward", TORCH_BOX(&silu_mul_backward));
  library.impl("delta_rule", TORCH_BOX(&delta_rule));
  library.impl("decode_attention", TORCH_BOX(&decode_attention));
  library.impl("decode_attention_bf16", TORCH_BOX(&decode_attention_bf16));
}

}  // namespace

// torch.ops.<JETRL_OPERATORS>: several versions of the kernels in one process need different names.
#ifndef JETRL_OPERATORS
#define JETRL_OPERATORS jetrl_native
#endif
#define JETRL_LIBRARY(name, library) STABLE_TORCH_LIBRARY(name, library)
#define JETRL_LIBRARY_IMPL(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)

JETRL_LIBRARY(JETRL_OPERATORS, library) { declare(library); }
JETRL_LIBRARY_IMPL(JETRL_OPERATORS, JETRL_DISPATCH_KEY, library) { implement(library); }

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Layouts that kernels share, and the host's interface to the kernels.
//
// Shared-memory operand tile: TMA writes a box of `rows` x 128 bytes (128 E4M3 qdata: one K block) with the 128-byte
// swizzle: the 16-byte chunk index of an address (bits 4..6) is XORed with its row within eight rows (bits 7..9). A
// tile starts on a multiple of 1024 bytes (eight rows), so the swizzle depends on the address alone, and wgmma applies
// it too: no code here computes a swizzled operand address.
//
// wgmma's FP32 accumulator (m64nN): thread t of the warpgroup, lane l = t % 32, holds for each n8 chunk j
//   d[4j + 0..1] = D[16 (t / 32) + l / 4    ][8j + 2 (l % 4) + 0..1]
//   d[4j + 2..3] = D[16 (t / 32) + l / 4 + 8][8j + 2 (l % 4) + 0..1]

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JETRL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JETRL_HOST_DEVICE inline
#endif

namespace jetrl {

constexpr int kGroup = 128;            // qdata that share a scale along K; bytes in a row of an operand tile
constexpr int kChainLength = 4;        // wgmma k32 instructions in one K block
constexpr int kSharedMemory = 232448;  // the most that a block of sm_90 can have: 227 KiB

JETRL_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
JETRL_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// wgmma's matrix descriptor for a K-major tile:
//   bits  0..13  start address / 16
//   bits 16..29  leading byte offset / 16: unused with a swizzle as wide as the row; 1 by convention
//   bits 32..45  stride byte offset / 16: from eight rows to the next eight, 1024 / 16 = 64
//   bits 49..51  base offset: 0, because tiles start on multiples of 1024
//   bits 62..63  layout: 1, the 128-byte swizzle
// An instruction contracts 32 qdata (32 bytes), so the four of one K block start 0, 32, 64 and 96 bytes into the row, 2
// units of the address field apart. The hardware adds row offsets to the start before the XOR, so a start inside the
// first 128-byte row leaves bits 7..9 of every address to its row. Tile rows r..r+63 start at r * 128.
JETRL_HOST_DEVICE uint64_t operand_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLeading = 1, kStride = 1024 / 16, kSwizzle128 = 1;
  return (uint64_t(shared_address & 0x3FFFF) >> 4) | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

constexpr uint64_t kDescriptorStepK32 = 32 / 16;        // next 32 qdata of the same rows
constexpr uint64_t kDescriptorStep64Rows = 64 * kGroup / 16;

// Order of output tiles in a persistent grid: down groups of `group` tile rows, then one column on, so that tiles in
// flight form a roughly square block and share operands in L2.
struct TileOrder {
  int tiles_m, tiles_n, group;

  JETRL_HOST_DEVICE int count() const { return tiles_m * tiles_n; }

  JETRL_HOST_DEVICE void locate(int tile, int& tile_m, int& tile_n) const {
    const int first_row = tile / (group * tiles_n) * group;
    const int rows = tiles_m - first_row < group ? tiles_m - first_row : group;
    const int in_group = tile - first_row * tiles_n;
    tile_m = first_row + in_group % rows;
    tile_n = in_group / rows;
  }
};

// A tile of `block` rows of one operand and 128 of the other, and the time of a round of such tiles.
struct TileCost {
  int block, cost;
};

// The block with the least time over all rounds; the first of equals.
template <int kChoices>
constexpr int choose_block(const TileCost (&choices)[kChoices], int rows, int others, int processors) {
  int best = 0, least = 0;
  for (const TileCost& tile : choices) {
    const int cost = tile.cost * ceil_div(ceil_div(rows, tile.block) * ceil_div(others, 128), processors);
    if (best == 0 || cost < least) best = tile.block, least = cost;
  }
  return best;
}

// Whether K divides into `count` equal slices that are multiples of 128, one per tensor-parallel rank.
inline bool has_slices(int k, int count) {
  return count >= 1 && count <= k / kGroup && k % (count * kGroup) == 0;
}

// FP32 scales with any strides, in elements.
struct Scales {
  const float* data;
  int64_t stride_row, stride_group;
};

// Whether the copy engine can read `rows` scales of a group at once: contiguous, groups a multiple of 16 bytes apart.
inline bool scales_suit_tma(const Scales& scales, int rows) {
  return (scales.stride_row == 1 || rows == 1) && scales.stride_group > 0 && scales.stride_group % 4 == 0 &&
         scales.stride_group >= rows && reinterpret_cast<uintptr_t>(scales.data) % 16 == 0;
}

// FP8 data [rows, k], contiguous along k; `row_stride` in bytes is a multiple of 16, like `qdata`.
struct Operand {
  const void* qdata;
  int rows;
  int64_t row_stride;
  Scales scales;
};

struct Bias {
  const void* data;  // nullptr: none
  bool fp32;         // else BF16
};

// Rows of experts: expert e has rows start[e] to start[e + 1] - 1, or none. `start`, experts + 1 ascending numbers from
// zero, is on the device; the host does not know it. `aligned`: they are multiples of 4, as the copy engine needs to
// read scales (16 bytes; other addresses are an illegal instruction).
struct Segments {
  const int* start;
  int experts;
  bool aligned = false;
};

// Most tiles of `block` rows that all experts together can have: each expert with rows has one tile that is not full.
JETRL_HOST_DEVICE constexpr int most_row_tiles(int rows, int experts, int block) {
  const int hit = experts < rows ? experts : rows;
  return hit + (rows - hit) / block;
}

// Matrices [n, k] of all experts as parts of one matrix [all.rows, columns]: that of expert e begins at row e *
// row_step and column e * column_step, its scales e * scale_step elements after the first. n and k are multiples of
// 128.
struct ExpertOperand {
  Operand all;
  int n, k, columns, row_step, column_step;
  int64_t scale_step;
};

// Supported layouts: experts below each other, as in weights, or next to each other, as in their transpose; `all.qdata`
// is nullptr for any other. Strides in elements.
inline ExpertOperand expert_operand(const void* qdata, int experts, int n, int k, int64_t expert_stride,
                                    int64_t row_stride, const Scales& scales, int64_t scale_step) {
  ExpertOperand w{{qdata, n, row_stride, scales}, n, k, k, 0, 0, scale_step};
  if (experts == 1) return w;
  if (expert_stride % row_stride == 0 && expert_stride / row_stride >= n) {
    w.row_step = int(expert_stride / row_stride);
    w.all.rows = (experts - 1) * w.row_step + n;
  } else if (expert_stride >= k && (experts - 1) * expert_stride + k <= row_stride) {
    w.column_step = int(expert_stride);
    w.columns = (experts - 1) * w.column_step + k;
  } else {
    w.all.qdata = nullptr;
  }
  return w;
}

// Row stride in elements. Rows start on multiples of 16 bytes and hold a multiple of 16 bytes.
struct Output {
  void* data;
  int64_t row_stride;
  bool fp32;  // else BF16
};

// A BF16 box that the copy engine writes: the rows of a warp, 128 bytes of each.
constexpr int kStoreRows = 16, kStoreColumns = 64;

// Zero: the kernel chooses. Only the speed depends on it, never a bit of the result.
struct Config {
  // Rows per tile: of W in fprop 64, 128, 192 or 256, of A in wgrad 128 or 256, with 128 rows of the other operand; of
  // W in decode_fprop 16, 32, 48 or 64.
  int block = 0;
  int cluster = 0;  // blocks that share an operand tile by multicast
};

using Stream = void*;

// How a kernel is launched. With `overlaps` (programmatic dependent launch) its blocks may start before the previous
// kernel in the stream ends, once every block of that one has called griddepcontrol.launch_dependents or exited. Such a
// kernel calls sm90::wait_for_previous_kernel before it reads what the previous one writes or writes what that one
// reads. It may read at once what earlier kernels wrote if the previous one has waited for them: because it was
// launched without `overlaps`, or because none of its blocks exits without that wait.
struct Grid {
  int blocks, cluster, threads, shared_bytes;
  Stream stream;
  bool overlaps = false;
  int columns = 1;  // each of `blocks` blocks: block b of column c is sm90::block_index() and sm90::block_column()
};

// Y[M,N] = X W^T (+ bias), 1x128 scales on X, 128x128 scales on W, BF16 out.
void fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config, Stream stream);
// The sum of the products of `ranks` equal slices of K, each rounded to BF16 as in fprop, added in FP32 in order and
// rounded once. K is a multiple of 128 `ranks`; tiles take 64 or 128 rows of W.
void fprop_of_ranks(const Operand& x, const Operand& w, int k, int ranks, const Output& y, Config config,
                    Stream stream);
// fprop for few rows of X; the same bits. `static_weight`: the previous kernel in the stream writes neither W nor the
// bias, and lets no kernel start before all earlier ones have ended (Grid). Then copies of W start while it runs; only
// the speed depends on it.
void decode_fprop(const Operand& x, const Operand& w, int k, const Bias& bias, const Output& y, Config config,
                  bool static_weight, Stream stream);
// dW[N,K] = A B^T with A = dY^T [N,T], B = X^T [K,T], 1x128 scales along T on both, `t` tokens.
void wgrad(const Operand& a, const Operand& b, int t, const Output& dw, Config config, Stream stream);

// fprop of each expert's rows with its own matrix, once per slice of K (`slices` equal ones, multiples of 128), to y
// [slices * rows, n]. Rows after the last segment are not written. Tiles take 128 or 256 rows of W; blocks of a cluster
// share rows of X.
void grouped_fprop(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                   Config config, Stream stream);
// The same for few rows per expert; the same bits. Tiles take 32, 64 or 128 rows of W. `static_weight` as in
// decode_fprop: blocks may start before the previous kernel ends. With `static_segments` it does not write
// `segments.start` either, and copies of W may start as well.
void grouped_decode(const Operand& x, const ExpertOperand& w, const Segments& segments, int slices, const Output& y,
                    Config config, bool static_weight, bool static_segments, Stream stream);
// wgrad of each expert's tokens, to dw [experts * N, K] BF16; zeros for an expert without tokens. Segments are
// multiples of 128 tokens.
void grouped_wgrad(const Operand& a, const Operand& b, int t, const Segments& segments, const Output& dw, Config config,
                   Stream stream);

// FP8 data [columns, rows] of the transpose; `row_stride` in bytes is a multiple of 16, like `qdata`.
struct Transposed {
  void* qdata;
  int64_t row_stride;
  float* scales;
};

// x [M,K] with 1x128 scales to qdata [K,M] with a scale per 128 tokens, [ceil(M/128), K]: WGrad's operand. k and the
// row stride are multiples of 16; rows of `out` have room for M rounded up to 128, filled with zeros (or NaN) after M.
void relayout_128x1(const Operand& x, int k, bool pow2, const Transposed& out, Stream stream);
// w [N,K] with 128x128 scales to its transpose, [K,N], scales [ceil(K/128), ceil(N/128)]; N and K multiples of 16.
void transpose_128x128(const Operand& w, int k, const Transposed& out, Stream stream);

// BF16 numbers [rows, columns], contiguous along columns; `stride` in elements, a multiple of 8, as are the columns.
struct Bf16Rows {
  const uint16_t* data;
  int64_t stride;
};

// 1x128 qdata [rows, columns] with scales [columns / 128, rows], and 128x1 qdata of the same BF16 numbers.
struct QuantizedBothWays {
  void* qdata;
  float* scales;
  Transposed columns;
};

// The gradients of silu(gate) * up [rows, k] for dy, quantized along both dimensions; k is a multiple of 128.
void silu_mul_backward(const Bf16Rows& dy, const Bf16Rows& gate, const Bf16Rows& up, int rows, int k, bool pow2,
                       const QuantizedBothWays& dgate, const QuantizedBothWays& dup, Stream stream);

// One new token of each request over a KV cache. BF16 q and out [requests, kv_heads * group, 128], strides of requests
// in elements, multiples of 8; lengths [requests] tokens, the new one included; table [requests, ...] their pages of
// 16 * units tokens, rows `stride_table` apart. `cluster`: 1, 2, 4 or 8 blocks share a request and KV head, which
// changes no bit.
struct DecodeAttention {
  const uint16_t* q;
  uint16_t* out;
  const int32_t *lengths, *table;
  int64_t stride_q, stride_out, stride_table;
  int requests, kv_heads, group, units;
  float scale;
  int cluster;
};
// FP8 cache [pages, kv_heads, units, 4128] bytes (reference/kv_cache.py).
void decode_attention(const DecodeAttention& call, const void* cache, Stream stream);

// BF16 keys and values [pages, tokens, kv_heads, 128]; strides in steps of 16 bytes, addresses multiples of 16 bytes.
// All pages lie within 2^31 steps.
struct Bf16Pages {
  const uint8_t *keys, *values;
  int stride_page, stride_token, stride_head;
};
void decode_attention_bf16(const DecodeAttention& call, const Bf16Pages& pages, Stream stream);

// The gated delta rule over sequences whose tokens are cu_seqlens[i] .. cu_seqlens[i + 1]. BF16 qkv [tokens,
// (2 keys + heads) 128] and out [tokens, heads, 128], contiguous; FP32 b and a [tokens, heads], rows `stride_b` and
// `stride_a` apart; a_log FP32 (taken at its BF16 value) and dt_bias BF16 [heads]. States (delta_rule.cuh): FP32 [slots,
// heads, 193, 128], slots and heads multiples of four elements apart, or null: then sequences begin with zeros. A
// negative slot gives zeros and is not written; without computed tokens a slot is not read.
struct DeltaRule {
  const uint16_t* qkv;
  const float *b, *a, *a_log;
  const uint16_t* dt_bias;
  float* states;
  const int32_t *slots, *computed, *cu_seqlens;
  uint16_t* out;
  int64_t stride_b, stride_a, stride_slot, stride_head;
  int tokens, sequences, keys, heads;
};
void delta_rule(const DeltaRule& call, Stream stream);
// The same for few tokens a sequence, which are computed one by one; with states.
void delta_decode(const DeltaRule& call, Stream stream);

}  // namespace jetrl

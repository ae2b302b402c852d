// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The gated delta rule (delta_rule.cuh) over chunks of 64 tokens: training, prompts and mixed steps.
//
// A block has one value head. Values are the rows of every product, so a warp has 16 of them from end to end: S in FP32
// registers, BF16 of it as an operand, u of its rows first in the registers that sum it, then as an operand. Once a
// chunk the warps share out what does not depend on values: norms, gates, and the factors a and P. Within a block of 16
// rows u goes from lane to lane of four, two rows at a time, and the sums of later rows take it in FP32. The next
// chunk's rows arrive meanwhile.
//
// Of few long sequences, whose time is that of one chunk after the other, a block has half of a head's values, and as
// many warps more, the helpers: while the values of chunk i are computed, they compute the factors of chunk i + 1, norms
// and gates of chunk i + 2, and copy the rows of chunk i + 3.

#include "delta_rule.cuh"

namespace jetrl {
namespace {

using namespace delta;

constexpr int kPieces = kHead / 8;         // of 16 bytes in a row of queries or keys
constexpr int kFactorPieces = kChunk / 8;  // in a row of factors
constexpr int kRowTile = kChunk * 2 * kHead, kFactorTile = kChunk * 2 * kChunk;

// Warps and threads of one role, and shared memory in bytes: stages of rows, then what chunks are computed with.
template <bool kHelpers>
struct Layout {
  static constexpr int kSlices = kHelpers ? 2 : 1;  // of a head's values, each of a block
  static constexpr int kWarps = kHead / (kSlices * kValues), kThreads = 32 * kWarps, kValuePieces = 2 * kWarps;
  static constexpr int kOfQ = kRowTile, kOfV = 2 * kRowTile, kOfGates = kOfV + kChunk * 16 * kValuePieces;
  static constexpr int kStage = kOfGates + 2 * kChunk * 4;
  // A chunk's factors: a, P, and within blocks FP32 [block][j][pair of rows]: a, a, P, P.
  static constexpr int kOutputFactors = kFactorTile, kWithin = 2 * kFactorTile;
  static constexpr int kOfFactors = kWithin + kChunk * kBlock * 2 * 4;
  static constexpr int kOfVectors = 5 * kChunk * 4;
  static constexpr int kStages = kHelpers ? 4 : 2, kFactorSets = kHelpers ? 2 : 1, kVectorSets = kHelpers ? 3 : 1;
  static constexpr int kFactors = kStages * kStage, kVectors = kFactors + kFactorSets * kOfFactors;
  static constexpr int kDeltas = kVectors + kVectorSets * kOfVectors;  // u as operands, of each thread alone
  static constexpr int kBytes = kDeltas + kThreads * kChunk;
};

// Of a chunk's rows.
struct Vectors {
  float *total, *beta, *since, *until, *steps;  // G, beta, exp(G), exp(G_63 - G), g

  JETRL_DEVICE explicit Vectors(float* at)
      : total(at), beta(at + kChunk), since(at + 2 * kChunk), until(at + 3 * kChunk), steps(at + 4 * kChunk) {}
};

JETRL_DEVICE float2 pair_at(const float* from) { return *reinterpret_cast<const float2*>(from); }

template <bool kHelpers>
struct Chunk {
  using Bytes = Layout<kHelpers>;
  static constexpr int kWarps = Bytes::kWarps;

  const DeltaRule& p;
  const Sequence& sequence;
  uint8_t* memory;
  uint32_t address;
  int head, first_value, thread, lane, warp;
  // Row r is token `base` + r. Rows up to `known` come from the state, `rows` are there in all.
  int base, known, rows;
  int number;                              // among the call's chunks
  uint32_t stage, factor_set, vector_set;  // offsets
  int64_t row_stride;
  const uint16_t* first_query;  // of token 0

  JETRL_DEVICE Chunk(const DeltaRule& call, const Sequence& of, int of_head, int slice)
      : p(call), sequence(of), memory(sm90::dynamic_shared_memory()), address(sm90::shared_address(memory)),
        head(of_head), first_value(slice * kValues * kWarps), thread(sm90::thread_index() % Bytes::kThreads),
        lane(thread % 32), warp(thread / 32), base(of.begin - of.computed % kChunk), known(of.computed % kChunk),
        number(0), row_stride(int64_t(2 * p.keys + p.heads) * kHead), first_query(Rows(p, 0, head).q) {
    go_to(0);
  }

  // From this chunk to one of the others of the call, `known` left as it is.
  JETRL_DEVICE void go_to(int index) {
    base += kChunk * (index - number), number = index, rows = rows_from(base);
    stage = index % Bytes::kStages * Bytes::kStage;
    factor_set = Bytes::kFactors + index % Bytes::kFactorSets * Bytes::kOfFactors;
    vector_set = Bytes::kVectors + index % Bytes::kVectorSets * Bytes::kOfVectors;
  }

  JETRL_DEVICE int rows_from(int token) const {
    return sequence.end - token < kChunk ? sequence.end - token : kChunk;
  }
  JETRL_DEVICE bool is_last() const { return base + kChunk >= sequence.end; }
  JETRL_DEVICE bool is_new(int row) const { return row >= known && row < rows; }
  JETRL_DEVICE Vectors vectors() const { return Vectors(reinterpret_cast<float*>(memory + vector_set)); }

  JETRL_DEVICE void advance() {
    known = 0;
    go_to(number + 1);
  }

  // Starts copies of the rows; zeros where there is none. Known rows of v are their u.
  JETRL_DEVICE void load() const {
    constexpr int kRows = Bytes::kThreads / kPieces, kRowsOfV = Bytes::kThreads / Bytes::kValuePieces;
    static_assert(kRows % 8 == 0 && kRowsOfV % 8 == 0, "a thread's pieces lie alike in their rows");
    int row = thread / kPieces;
    uint32_t to = address + stage + piece(row, thread % kPieces, kPieces);
    const uint16_t* q = first_query + (base + row) * row_stride + thread % kPieces * 8;
    const uint16_t* stored = sequence.state + (kKeyRows + row) * kHead + thread % kPieces * 8;
#pragma unroll 1
    for (; row < kChunk; row += kRows) {
      sm90::cp_async_16(to, row < known ? stored : q + p.keys * kHead, row < rows);
      sm90::cp_async_16(to + Bytes::kOfQ, q, is_new(row));
      to += kRows * 2 * kHead, q += kRows * row_stride, stored += kRows * kHead;
    }
    row = thread / Bytes::kValuePieces;
    const int part = thread % Bytes::kValuePieces, column = first_value + part * 8;
    to = address + stage + Bytes::kOfV + piece(row, part, Bytes::kValuePieces);
    const uint16_t* v = p.qkv + (base + row) * row_stride + (2 * p.keys + head) * kHead + column;
    stored = sequence.state + (kDeltaRows + row) * kHead + column;
#pragma unroll 1
    for (; row < kChunk; row += kRowsOfV) {
      sm90::cp_async_16(to, row < known ? stored : v, row < rows);
      to += kRowsOfV * 16 * Bytes::kValuePieces, v += kRowsOfV * row_stride, stored += kRowsOfV * kHead;
    }
    if (thread < kChunk) {
      const int64_t token = base + thread;
      const uint32_t to = address + stage + Bytes::kOfGates + 4 * thread;
      sm90::cp_async_f32(to, p.b + token * p.stride_b + head, is_new(thread));
      sm90::cp_async_f32(to + 4 * kChunk, p.a + token * p.stride_a + head, is_new(thread));
    }
  }

  // One warp: gates of two rows a lane, and their sums in order, which every lane adds up.
  JETRL_DEVICE void compute_gates(float a_log, float dt_bias) const {
    const Vectors of = vectors();
    const float* b = reinterpret_cast<const float*>(memory + stage + Bytes::kOfGates);
    const float* stored = reinterpret_cast<const float*>(sequence.state + kTotalRow * kHead);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      of.steps[row] = is_new(row) ? log_decay(b[kChunk + row], a_log, dt_bias) : 0.0f;
      of.beta[row] = is_new(row) ? strength(b[row]) : 0.0f;
    }
    sm90::sync_warp();
    float total = known > 0 ? stored[known - 1] : 0.0f, own[2] = {};
#pragma unroll
    for (int row = 0; row < kChunk; row += 4) {
      const float4 g = *reinterpret_cast<const float4*>(of.steps + row);
      const float steps[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total = sm90::add(total, steps[i]);
        own[i % 2] = lane == (row + i) / 2 ? total : own[i % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      const float of_row = row < known ? stored[row] : own[i];
      of.total[row] = of_row;
      of.since[row] = expf(of_row);
      of.until[row] = decay_between(total, of_row);
    }
  }

  // Warps from the second on: norms, in place, of eight rows of keys or queries at a time.
  JETRL_DEVICE void normalize_rows() const {
#pragma unroll 1
    for (int i = warp - 1; i < 2 * kChunk / 8; i += kWarps - 1) {
      const int row = 8 * i % kChunk + lane / 4;
      if (row - lane / 4 >= rows) continue;
      uint8_t* tile = memory + stage + (i < kChunk / 8 ? 0 : Bytes::kOfQ);
      uint2 words[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        words[g] = *reinterpret_cast<const uint2*>(tile + piece(row, 2 * g + lane % 4 / 2, kPieces) + lane % 2 * 8);
      }
      normalize(words);
      if (!is_new(row)) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        *reinterpret_cast<uint2*>(tile + piece(row, 2 * g + lane % 4 / 2, kPieces) + lane % 2 * 8) = words[g];
      }
    }
  }

  // a or P of 16 x 16 rows at a time.
  JETRL_DEVICE void compute_factors() const {
    constexpr int kTiles = 10;  // of four blocks with each other, on and below the diagonal
#pragma unroll 1
    for (int i = warp; i < 2 * kTiles; i += kWarps) {
      const int tile = i / 2, of_output = i % 2;
      const int later = tile >= 6 ? 3 : tile >= 3 ? 2 : tile >= 1 ? 1 : 0, earlier = tile - later * (later + 1) / 2;
      if (kBlock * later >= rows || kBlock * (later + 1) <= known) continue;
      const uint32_t keys = address + stage;
      float d[2][4] = {};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint32_t a[4], low[2], high[2];
        load_a(a, keys + (of_output ? Bytes::kOfQ : 0), kBlock * later, 2 * g, kPieces, lane);
        load_b(low, high, keys, kBlock * earlier, 2 * g, kPieces, lane);
        sm90::mma_bf16(d[0], a, low);
        sm90::mma_bf16(d[1], a, high);
      }
      const Vectors of = vectors();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = kBlock * later + lane / 4 + 8 * half;
        const float total = of.total[row], beta = of.beta[row];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = kBlock * earlier + 8 * n + 2 * (lane % 4);
          const float2 totals = pair_at(of.total + column);
          float factors[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float product = d[n][2 * half + c], decay = decay_between(total, c == 0 ? totals.x : totals.y);
            const float factor = of_output ? factor_of_output(product, decay) : factor_of_delta(product, beta, decay);
            factors[c] = column + c < row + of_output ? factor : 0.0f;
          }
          if (earlier < later) {
            uint8_t* to = memory + factor_set + (of_output ? Bytes::kOutputFactors : 0);
            *reinterpret_cast<uint32_t*>(to + piece(row, column / 8, kFactorPieces) + lane % 4 * 4) =
                sm90::pack_bf16(factors[0], factors[1]);
          } else {
            float* to = reinterpret_cast<float*>(memory + factor_set + Bytes::kWithin) +
                        (column * (kBlock / 2) + row % kBlock / 2) * 4 + 2 * of_output + row % 2;
            to[0] = factors[0], to[kBlock / 2 * 4] = factors[1];
          }
        }
      }
    }
  }

  JETRL_DEVICE uint32_t place_of_values(int row) const {  // of this lane, as an operand
    return address + stage + Bytes::kOfV +
           piece(row + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2, Bytes::kValuePieces);
  }
  JETRL_DEVICE uint4* place_of_delta(int block) const {
    return reinterpret_cast<uint4*>(memory + Bytes::kDeltas) + block * Bytes::kThreads + thread;
  }

  // Adds the rows before this block to the sums of its rows.
  JETRL_DEVICE void add_blocks(float (&x)[2][4], float (&y)[2][4], int block) const {
#pragma unroll 1
    for (int j = 0; j < block; ++j) {
      const uint4 words = *place_of_delta(j);
      const uint32_t u[4] = {words.x, words.y, words.z, words.w};
      uint32_t low[2], high[2];
      load_b(low, high, address + factor_set, kBlock * block, 2 * j, kFactorPieces, lane);
      sm90::mma_bf16(x[0], u, low);
      sm90::mma_bf16(x[1], u, high);
      load_b(low, high, address + factor_set + Bytes::kOutputFactors, kBlock * block, 2 * j, kFactorPieces, lane);
      sm90::mma_bf16(y[0], u, low);
      sm90::mma_bf16(y[1], u, high);
    }
  }

  // u of a block's rows from their sums, two rows after the other, and what they add to the outputs. `stored`: of the
  // rows that are known already, `known_here` of them.
  template <bool kSomeKnown>
  JETRL_DEVICE void add_within(uint32_t (&u)[4], float (&x)[2][4], float (&y)[2][4], const uint32_t (&stored)[4],
                               int known_here, int block) const {
    const float4* factors =
        reinterpret_cast<const float4*>(memory + factor_set + Bytes::kWithin) + block * kBlock * kBlock / 2;
    const int quad = lane % 4;
#pragma unroll
    for (int pair = 0; pair < kBlock / 2; ++pair) {
      const int n = pair / 4, owner = pair % 4;
      const float4* of_pair = factors + 2 * pair * kBlock / 2 + quad;
      const float4 first = of_pair[4 * n], second = of_pair[4 * n + kBlock / 2];
      float u0[2], u1[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t word = sm90::pack_bf16(x[n][2 * r], 0.0f);
        if (kSomeKnown && 2 * pair < known_here) word = stored[2 * n + r] & 0xFFFF;
        const float next = sm90::multiply_add(first.y, sm90::low_half(word), x[n][2 * r + 1]);
        if (kSomeKnown) {
          word |= 2 * pair + 1 < known_here ? stored[2 * n + r] & 0xFFFF0000u : sm90::pack_bf16(0.0f, next);
        } else {
          word = sm90::pack_bf16(x[n][2 * r], next);
        }
        word = uint32_t(sm90::shuffle(int(word), lane - quad + owner));
        if (quad == owner) u[2 * n + r] = word;
        u0[r] = sm90::low_half(word), u1[r] = sm90::high_half(word);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Sums of earlier rows, and of these, are not read again.
        x[n][2 * r] = sm90::multiply_add(second.x, u1[r], sm90::multiply_add(first.x, u0[r], x[n][2 * r]));
        x[n][2 * r + 1] = sm90::multiply_add(second.y, u1[r], sm90::multiply_add(first.y, u0[r], x[n][2 * r + 1]));
        if (quad >= owner) {
          y[n][2 * r] = sm90::multiply_add(first.z, u0[r], y[n][2 * r]);
          y[n][2 * r + 1] = sm90::multiply_add(second.w, u1[r], sm90::multiply_add(first.w, u0[r], y[n][2 * r + 1]));
        }
        if (quad > owner) y[n][2 * r] = sm90::multiply_add(second.z, u1[r], y[n][2 * r]);
      }
      if (n == 0) {
        const float4 third = of_pair[4], fourth = of_pair[4 + kBlock / 2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[1][2 * r] = sm90::multiply_add(fourth.x, u1[r], sm90::multiply_add(third.x, u0[r], x[1][2 * r]));
          x[1][2 * r + 1] = sm90::multiply_add(fourth.y, u1[r], sm90::multiply_add(third.y, u0[r], x[1][2 * r + 1]));
          y[1][2 * r] = sm90::multiply_add(fourth.z, u1[r], sm90::multiply_add(third.z, u0[r], y[1][2 * r]));
          y[1][2 * r + 1] = sm90::multiply_add(fourth.w, u1[r], sm90::multiply_add(third.w, u0[r], y[1][2 * r + 1]));
        }
      }
    }
  }

  // Writes this warp's values of a block's new rows; `to` is that of the chunk's first row.
  JETRL_DEVICE void write_rows(const uint32_t (&words)[4], uint16_t* to, int64_t row_stride, int first_row) const {
    sm90::sync_warp();
    sm90::stmatrix_x4_transposed(place_of_values(first_row), words[0], words[1], words[2], words[3]);
    sm90::sync_warp();
    const int row = first_row + lane / 2, part = lane % 2;
    if (!is_new(row)) return;
    const uint8_t* from = memory + stage + Bytes::kOfV + piece(row, 2 * warp + part, Bytes::kValuePieces);
    uint16_t* place = to + row * row_stride + first_value + kValues * warp + 8 * part;
    *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(from);
  }

  JETRL_DEVICE void compute_block(int block, const uint32_t (&s16)[kGroups][4]) const {
    const int first_row = kBlock * block;
    uint32_t values[4], u[4];
    sm90::ldmatrix_x4_transposed(values, place_of_values(first_row));
    if (first_row + kBlock <= known) {
      *place_of_delta(block) = uint4{values[0], values[1], values[2], values[3]};
      return;
    }
    float x[2][4] = {}, y[2][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t low[2], high[2];
      load_b(low, high, address + stage, first_row, 2 * g, kPieces, lane);
      sm90::mma_bf16(x[0], s16[g], low);
      sm90::mma_bf16(x[1], s16[g], high);
      load_b(low, high, address + stage + Bytes::kOfQ, first_row, 2 * g, kPieces, lane);
      sm90::mma_bf16(y[0], s16[g], low);
      sm90::mma_bf16(y[1], s16[g], high);
    }
    const Vectors of = vectors();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = first_row + 8 * n + 2 * (lane % 4);
      const float2 beta = pair_at(of.beta + row), since = pair_at(of.since + row);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t v = values[2 * n + r];
        x[n][2 * r] = begin_delta(x[n][2 * r], sm90::low_half(v), beta.x, since.x);
        x[n][2 * r + 1] = begin_delta(x[n][2 * r + 1], sm90::high_half(v), beta.y, since.y);
        y[n][2 * r] = begin_output(y[n][2 * r], since.x);
        y[n][2 * r + 1] = begin_output(y[n][2 * r + 1], since.y);
      }
    }
    add_blocks(x, y, block);
    if (first_row < known) {
      add_within<true>(u, x, y, values, known - first_row, block);
    } else {
      add_within<false>(u, x, y, values, 0, block);
    }
    *place_of_delta(block) = uint4{u[0], u[1], u[2], u[3]};
    const uint32_t o[4] = {sm90::pack_bf16(y[0][0], y[0][1]), sm90::pack_bf16(y[0][2], y[0][3]),
                           sm90::pack_bf16(y[1][0], y[1][1]), sm90::pack_bf16(y[1][2], y[1][3])};
    const int64_t out_row = int64_t(p.heads) * kHead;
    write_rows(o, p.out + base * out_row + head * kHead, out_row, first_row);
    if (sequence.state != nullptr && rows < kChunk) {
      write_rows(u, sequence.state + kDeltaRows * kHead, kHead, first_row);
    }
  }

  // S at the end of the chunk.
  JETRL_DEVICE void close(float (&s)[2 * kGroups][4]) const {
    const Vectors of = vectors();
    const float decay = of.since[kChunk - 1];
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) decay_tile(s[n], decay);
#pragma unroll 1
    for (int block = 0; block < kChunk / kBlock; ++block) {
      const uint4 words = *place_of_delta(block);
      const int row = kBlock * block + 2 * (lane % 4);
      const float2 low_rows = pair_at(of.until + row), high_rows = pair_at(of.until + row + 8);
      const uint32_t u[4] = {decayed(words.x, low_rows), decayed(words.y, low_rows), decayed(words.z, high_rows),
                             decayed(words.w, high_rows)};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint32_t low[2], high[2];
        load_b_transposed(low, high, address + stage, kBlock * block, 2 * g, kPieces, lane);
        sm90::mma_bf16(s[2 * g], u, low);
        sm90::mma_bf16(s[2 * g + 1], u, high);
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) round_tile(s[n]);
  }

  // Norms and gates.
  JETRL_DEVICE void prepare(float a_log, float dt_bias) const {
    if (warp == 0) {
      compute_gates(a_log, dt_bias);
    } else {
      normalize_rows();
    }
  }

  // Outputs, and S at the chunk's end.
  JETRL_DEVICE void compute_values(float (&s)[2 * kGroups][4]) const {
    {
      uint32_t s16[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &s[2 * g + i / 2][2 * (i % 2)];
          s16[g][i] = sm90::pack_bf16(pair[0], pair[1]);
        }
      }
#pragma unroll 1
      for (int block = 0; kBlock * block < rows; ++block) compute_block(block, s16);
    }
    if (rows == kChunk) close(s);
  }

  // Keys and sums of gates of an open chunk's new rows.
  JETRL_DEVICE void write_open_rows() const {
#pragma unroll 1
    for (int i = thread; i < rows * kPieces; i += Bytes::kThreads) {
      const int row = i / kPieces, part = i % kPieces;
      if (row < known) continue;
      *reinterpret_cast<uint4*>(sequence.state + (kKeyRows + row) * kHead + 8 * part) =
          *reinterpret_cast<const uint4*>(memory + stage + piece(row, part, kPieces));
    }
    if (thread < kChunk && is_new(thread)) {
      reinterpret_cast<float*>(sequence.state + kTotalRow * kHead)[thread] = vectors().total[thread];
    }
  }
};

JETRL_KERNEL void __launch_bounds__(Layout<false>::kThreads, 1) sm90_delta_chunks(JETRL_GRID_CONSTANT DeltaRule p) {
  const int head = sm90::block_index() % p.heads;
  sm90::wait_for_previous_kernel();
  const float a_log = p.a_log[head], dt_bias = sm90::bf16_to_float(p.dt_bias[head]);
  const Sequence sequence(p, sm90::block_index() / p.heads, head);
  if (sequence.begin >= sequence.end) return;
  if (!sequence.has_slot) {
    sequence.write_zeros(p, head, Layout<false>::kThreads);
    return;
  }
  Chunk<false> chunk(p, sequence, head, 0);
  chunk.load();
  float s[2 * kGroups][4] = {};
  const int value = kValues * chunk.warp + chunk.lane / 4;
  if (sequence.computed >= kChunk) {  // before, S is zero
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) load_tile(s[n], sequence.state, value, n, chunk.lane);
  }
  bool is_new = false;
#pragma unroll 1
  for (;; chunk.advance()) {
    sm90::cp_async_wait();
    sm90::sync_block();
    if (!chunk.is_last()) {
      Chunk<false> next = chunk;
      next.advance();
      next.load();
    }
    chunk.prepare(a_log, dt_bias);
    sm90::sync_block();
    chunk.compute_factors();
    sm90::sync_block();
    chunk.compute_values(s);
    is_new |= chunk.rows == kChunk;
    if (chunk.is_last()) break;
  }
  if (sequence.state == nullptr) return;
  if (chunk.rows < kChunk) chunk.write_open_rows();
  if (is_new) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) store_tile(s[n], sequence.state, value, n, chunk.lane);
  }
}

// Whole sequences, without states.
JETRL_KERNEL void __launch_bounds__(2 * Layout<true>::kThreads, 1)
    sm90_delta_chunks_with_helpers(JETRL_GRID_CONSTANT DeltaRule p) {
  constexpr int kSlices = Layout<true>::kSlices, kThreads = Layout<true>::kThreads;
  const int slice = sm90::block_index() % kSlices, head = sm90::block_index() / kSlices % p.heads;
  sm90::wait_for_previous_kernel();
  const float a_log = p.a_log[head], dt_bias = sm90::bf16_to_float(p.dt_bias[head]);
  const Sequence sequence(p, sm90::block_index() / kSlices / p.heads, head);
  if (sequence.begin >= sequence.end) return;
  if (!sequence.has_slot) {
    if (slice == 0) sequence.write_zeros(p, head, 2 * kThreads);
    return;
  }
  Chunk<true> chunk(p, sequence, head, slice);
  const int chunks = (sequence.end - sequence.begin + kChunk - 1) / kChunk;
  const bool helps = sm90::thread_index() >= kThreads;
  float s[2 * kGroups][4] = {};
#pragma unroll 1
  for (int i = -3; i < chunks; ++i) {  // chunk whose values are computed
    if (!helps) {
      if (i >= 0) {
        chunk.go_to(i);
        chunk.compute_values(s);
      }
    } else {
      if (i + 3 < chunks) {
        chunk.go_to(i + 3);
        chunk.load();
      }
      if (i + 1 >= 0 && i + 1 < chunks) {
        chunk.go_to(i + 1);
        chunk.compute_factors();
      }
      if (i + 2 >= 0 && i + 2 < chunks) {
        chunk.go_to(i + 2);
        chunk.prepare(a_log, dt_bias);
      }
      sm90::cp_async_wait();
    }
    sm90::sync_block();
  }
}

}  // namespace

void delta_rule(const DeltaRule& p, Stream stream) {
  // Both start while the convolution ends.
  using Whole = Layout<false>;
  using Halves = Layout<true>;
  const int heads = (p.sequences + 1) * p.heads;
  if (p.states != nullptr && p.tokens == p.sequences) {
    delta_decode(p, stream);
  } else if (p.states == nullptr && Halves::kSlices * p.sequences * p.heads <= multiprocessors()) {
    launch<sm90_delta_chunks_with_helpers>(
        Grid{Halves::kSlices * heads, 1, 2 * Halves::kThreads, Halves::kBytes, stream, true}, p);
  } else {
    launch<sm90_delta_chunks>(Grid{heads, 1, Whole::kThreads, Whole::kBytes, stream, true}, p);
  }
}

}  // namespace jetrl

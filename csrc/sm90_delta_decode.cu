// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The gated delta rule (delta_rule.cuh) of single tokens: decode.
//
// A block has one value head of a sequence, a warp 16 of its values and the factors of 8 rows. All that a token reads is
// on its way to shared memory at once: S16 and the open rows' k^, u and G. Meanwhile one warp computes the norms and
// another the gates. A product's columns are in turn those of k^ and of q^, so that each lane has both sums of two
// values. The state's lower halves are read, and S is written, with the last row of a chunk only.

#include "delta_rule.cuh"

namespace jetrl {
namespace {

using namespace delta;

constexpr int kWarps = kHead / kValues, kThreads = 32 * kWarps;
constexpr int kPieces = kHead / 8;

// Shared memory in bytes: of each warp 16 rows of S16, 8 of keys, 64 of u; the token's k^ and q^, factors of u and o, G,
// and G, beta and exp(G) of the token.
constexpr int kStateTile = kValues * 2 * kHead, kKeyTile = kChunk / kWarps * 2 * kHead, kDeltaTile = kChunk * 2 * kValues;
constexpr int kKeys = kWarps * kStateTile, kDeltas = kKeys + kWarps * kKeyTile;
constexpr int kOwn = kDeltas + kWarps * kDeltaTile, kFactors = kOwn + 2 * 2 * kHead;
constexpr int kTotals = kFactors + 2 * kChunk * 4, kGates = kTotals + kChunk * 4, kBytes = kGates + 16;

// Half a row of a warp's u.
JETRL_DEVICE uint32_t half_row(int row, int half) { return row * 2 * kValues + ((half ^ (row / 4 & 1)) << 4); }

JETRL_DEVICE uint2 load_8(const void* from) { return *reinterpret_cast<const uint2*>(from); }
JETRL_DEVICE void store_8(void* to, uint2 words) { *reinterpret_cast<uint2*>(to) = words; }

// Two values and the two `apart` further, of words that have one of each.
JETRL_DEVICE void store_pairs(uint16_t* to, int apart, uint32_t word, uint32_t next) {
  *reinterpret_cast<uint32_t*>(to) = sm90::permute_bytes(word, next, 0x5410);
  *reinterpret_cast<uint32_t*>(to + apart) = sm90::permute_bytes(word, next, 0x7632);
}

struct Decode {
  const DeltaRule& p;
  uint8_t* memory;
  uint32_t address;
  uint16_t* state;
  int head, thread, lane, warp, quad, row;  // of products

  JETRL_DEVICE Decode(const DeltaRule& call, uint16_t* of, int of_head)
      : p(call), memory(sm90::dynamic_shared_memory()), address(sm90::shared_address(memory)), state(of), head(of_head),
        thread(sm90::thread_index_reread()), lane(thread % 32), warp(thread / 32), quad(lane % 4), row(lane / 4) {}

  JETRL_DEVICE float* floats(int at) const { return reinterpret_cast<float*>(memory + at); }
  JETRL_DEVICE float* stored_totals() const { return reinterpret_cast<float*>(state + kTotalRow * kHead); }
  JETRL_DEVICE uint32_t deltas() const { return kDeltas + warp * kDeltaTile; }
  JETRL_DEVICE uint16_t* own_delta(int of_row, int half) const {
    return reinterpret_cast<uint16_t*>(memory + deltas() + half_row(of_row, half)) + row;
  }
  // Of a row of keys: 4 quad and the three that follow. Those of the sixteen keys `g` lie at ^ 32 g.
  JETRL_DEVICE uint32_t first_keys(int tile, int of_row) const {
    return tile + piece(of_row, quad / 2, kPieces) + quad % 2 * 8;
  }

  // u of sixteen rows as an operand.
  JETRL_DEVICE void load_deltas(uint32_t (&u)[4], int first_row) const {
    sm90::ldmatrix_x4_transposed(
        u, address + deltas() + half_row(first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2));
  }

  // Starts the copies of what a warp reads of the state, of which `t` rows are open. Two rows of 256 bytes at a time.
  JETRL_DEVICE void load(int t, bool is_first) const {
    const int upper = lane / 16, part = lane % 16, first_key = kChunk / kWarps * warp;
    const uint32_t s_to = address + piece(kValues * warp + upper, part, kPieces);
    const uint16_t* s = state + (kValues * warp + upper) * kHead + part * 8;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      sm90::cp_async_16((s_to ^ (2 * i % 8) << 4) + i * 4 * kHead, s + 2 * i * kHead, !is_first);
    }
    const uint32_t key_to = address + kKeys + piece(first_key + upper, part, kPieces);
    const uint16_t* key = state + (kKeyRows + first_key + upper) * kHead + part * 8;
#pragma unroll
    for (int i = 0; i < kChunk / kWarps / 2; ++i) {
      if (first_key + 2 * i + upper >= t) continue;
      sm90::cp_async_16((key_to ^ (2 * i % 8) << 4) + i * 4 * kHead, key + 2 * i * kHead, true);
    }
    const uint32_t u_to = address + deltas() + half_row(lane / 2, lane % 2);
    const uint16_t* u = state + (kDeltaRows + lane / 2) * kHead + kValues * warp + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (16 * i + lane / 2 < t) sm90::cp_async_16(u_to + 16 * i * 2 * kValues, u + 16 * i * kHead, true);
    }
    if (thread < t) sm90::cp_async_f32(address + kTotals + thread * 4, stored_totals() + thread, true);
  }

  // Norms, by one warp: eight lanes have the key and the query.
  JETRL_DEVICE void compute_rows(const Rows& rows, int t) const {
    const uint16_t* from = (row % 2 == 0 ? rows.k : rows.q) + 4 * quad;
    uint2 own[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) own[g] = load_8(from + 16 * g);
    normalize(own);
    if (row < 2) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) store_8(memory + kOwn + row * 2 * kHead + 32 * g + 8 * quad, own[g]);
    }
    if (row == 0) {
      const uint32_t to = first_keys(kKeys, t);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        store_8(memory + (to ^ 32 * g), own[g]);
        store_8(state + (kKeyRows + t) * kHead + 16 * g + 4 * quad, own[g]);
      }
    }
  }

  // Gates, by one warp.
  JETRL_DEVICE void compute_gates(int token, int t) const {
    const float b = p.b[token * p.stride_b + head], a = p.a[token * p.stride_a + head];
    const float before = t > 0 ? stored_totals()[t - 1] : 0.0f;
    const float total = sm90::add(before, log_decay(a, p.a_log[head], sm90::bf16_to_float(p.dt_bias[head])));
    if (lane > 0) return;
    *reinterpret_cast<float4*>(memory + kGates) = float4{total, strength(b), expf(total), 0.0f};
    floats(kTotals)[t] = stored_totals()[t] = total;
  }

  JETRL_DEVICE void compute(int token, int place) const {
    const int t = place % kChunk, begin = t / kBlock * kBlock;
    const int value = kValues * warp + row, first_key = kChunk / kWarps * warp;
    load(t, place < kChunk);
    const Rows rows(p, token, head);
    if (warp == 0) compute_rows(rows, t);
    if (warp == 1) compute_gates(token, t);
    const float v[2] = {sm90::bf16_to_float(rows.v[value]), sm90::bf16_to_float(rows.v[value + 8])};
    sm90::cp_async_wait();
    sm90::sync_block();

    const float4 gates = *reinterpret_cast<const float4*>(memory + kGates);
    const float total = gates.x, beta = gates.y, since = gates.z;
    // Sums of value `value` for u and o, then of the value eight further.
    float sums[4] = {}, products[4] = {};
    const uint32_t s_from = first_keys(0, value), keys_from = first_keys(kKeys, first_key + row);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint2 own = load_8(memory + kOwn + row % 2 * 2 * kHead + 32 * g + 8 * quad);
      const uint2 low = load_8(memory + (s_from ^ 32 * g)), high = load_8(memory + (s_from ^ 32 * g) + 16 * kHead);
      const uint2 key = load_8(memory + (keys_from ^ 32 * g));
      const uint32_t of_s[4] = {low.x, high.x, low.y, high.y}, of_own[2] = {own.x, own.y};
      const uint32_t of_row[4] = {own.x, 0, own.y, 0}, of_keys[2] = {key.x, key.y};
      sm90::mma_bf16(sums, of_s, of_own);
      sm90::mma_bf16(products, of_row, of_keys);
    }
    if (row < 2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = first_key + 2 * quad + c;
        const float decay = decay_between(total, floats(kTotals)[j]);
        const float factor =
            row == 0 ? factor_of_delta(products[c], beta, decay) : factor_of_output(products[c], decay);
        floats(kFactors)[row * kChunk + j] = j < t + row ? factor : 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[2 * r] = begin_delta(sums[2 * r], v[r], beta, since);
      sums[2 * r + 1] = begin_output(sums[2 * r + 1], since);
    }
    sm90::sync_block();

    const float* factors = floats(kFactors);
#pragma unroll 1
    for (int j = 0; j < begin; j += kBlock) {
      uint32_t u[4];
      load_deltas(u, j);
      const float* of_rows = factors + row % 2 * kChunk + j + 2 * quad;
      const float2 low = *reinterpret_cast<const float2*>(of_rows), high = *reinterpret_cast<const float2*>(of_rows + 8);
      const uint32_t of_factors[2] = {sm90::pack_bf16(low.x, low.y), sm90::pack_bf16(high.x, high.y)};
      sm90::mma_bf16(sums, u, of_factors);
    }
#pragma unroll 1
    for (int j = begin; j < t; j += 4) {
      const float4 of_delta = *reinterpret_cast<const float4*>(factors + j);
      const float4 of_output = *reinterpret_cast<const float4*>(factors + kChunk + j);
      const float delta[4] = {of_delta.x, of_delta.y, of_delta.z, of_delta.w};
      const float output[4] = {of_output.x, of_output.y, of_output.z, of_output.w};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint16_t* u = own_delta(j, r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j + i >= t) continue;
          const float of_row = sm90::bf16_to_float(u[i * kValues]);
          sums[2 * r] = sm90::multiply_add(delta[i], of_row, sums[2 * r]);
          sums[2 * r + 1] = sm90::multiply_add(output[i], of_row, sums[2 * r + 1]);
        }
      }
    }
    const uint32_t u = sm90::pack_bf16(sums[0], sums[2]);
    const float last = factors[kChunk + t];
    const uint32_t o = sm90::pack_bf16(sm90::multiply_add(last, sm90::low_half(u), sums[1]),
                                       sm90::multiply_add(last, sm90::high_half(u), sums[3]));
    const uint32_t next_u = sm90::shuffle_xor(u, 4), next_o = sm90::shuffle_xor(o, 4);  // of the value that follows
    const bool writes = quad == 0 && row % 2 == 0;
    if (writes) {
      store_pairs(p.out + (int64_t(token) * p.heads + head) * kHead + value, 8, o, next_o);
      store_pairs(state + (kDeltaRows + t) * kHead + value, 8, u, next_u);
    }
    if (t == kChunk - 1) {
      if (writes) store_pairs(own_delta(t, 0), int(own_delta(t, 1) - own_delta(t, 0)), u, next_u);
      close(total, place < kChunk);
    }
  }

  // S at the end of the chunk, sixteen keys at a time. Before the first chunk it is zero.
  JETRL_DEVICE void close(float total, bool is_first) const {
    float* until = floats(kTotals);
    if (thread < kChunk) until[thread] = decay_between(total, until[thread]);
    sm90::sync_block();
    uint32_t u[kChunk / kBlock][4];
#pragma unroll
    for (int i = 0; i < kChunk / kBlock; ++i) {
      load_deltas(u[i], kBlock * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* rows = until + kBlock * i + 8 * half + 2 * quad;
        const float2 of_rows = {rows[0], rows[1]};
        u[i][2 * half] = decayed(u[i][2 * half], of_rows);
        u[i][2 * half + 1] = decayed(u[i][2 * half + 1], of_rows);
      }
    }
    const float decay = expf(total);
    const int value = kValues * warp + row;
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
      float s[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (!is_first) load_tile(s[n], state, value, 2 * g + n, lane);
        decay_tile(s[n], decay);
      }
#pragma unroll
      for (int i = 0; i < kChunk / kBlock; ++i) {
        uint32_t low[2], high[2];
        load_b_transposed(low, high, address + kKeys, kBlock * i, 2 * g, kPieces, lane);
        sm90::mma_bf16(s[0], u[i], low);
        sm90::mma_bf16(s[1], u[i], high);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        round_tile(s[n]);
        store_tile(s[n], state, value, 2 * g + n, lane);
      }
    }
  }
};

JETRL_KERNEL void __launch_bounds__(kThreads, 3) sm90_delta_decode(JETRL_GRID_CONSTANT DeltaRule p) {
  const int head = sm90::block_index() % p.heads;
  sm90::wait_for_previous_kernel();
  const Sequence sequence(p, sm90::block_index() / p.heads, head);
  if (!sequence.has_slot) return sequence.write_zeros(p, head, kThreads);
#pragma unroll 1
  for (int token = sequence.begin; token < sequence.end; ++token) {
    if (token > sequence.begin) sm90::sync_block();
    // Made here, or the compiler keeps all that depends on the thread alone from token to token.
    Decode(p, sequence.state, head).compute(token, sequence.computed + token - sequence.begin);
  }
}

}  // namespace

void delta_decode(const DeltaRule& p, Stream stream) {
  // Starts while the convolution ends.
  launch<sm90_delta_decode>(Grid{(p.sequences + 1) * p.heads, 1, kThreads, kBytes, stream, true}, p);
}

}  // namespace jetrl

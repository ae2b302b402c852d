// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The gated delta rule (reference/delta_net.py), one step per token, of prompts, decodes and training alike:
//
//   r = S k,  a = S q             sums over keys of the state before the token, k and q as they are stored
//   d = (v - decay n r) beta n    n = 1 / |k|
//   S = decay S + d k^T
//   o = decay m a + m (q k) d     m = 128^-1/2 / |q|
//
// Norms and decay multiply sums, not the keys, and both sums read one state. 16 lanes share kValues rows of the state (a
// row is a value's 128 keys), a lane has keys 4 l .. 4 l + 3 of each half of a row; fewer values where blocks of eight
// would leave multiprocessors idle. A token waits for no other warp. The order of a sum is a lane's eight products, then
// lanes 8, 4, 2, 1 apart, for every kValues; it is the same whether a launch of its own has computed the factors of
// norms and gates, or the block itself.

#include <cmath>

#include "launch.h"
#include "sm90.cuh"

namespace jetrl {
namespace {

constexpr int kHead = 128, kLanes = 16;
constexpr int kAhead = 16;                              // tokens from a prefetch to its use
constexpr int kFactorThreads = 64, kFactorTokens = kFactorThreads / kLanes;  // of a block that computes factors

// What multiplies a token's sums in one head.
struct Factors {
  float4 of_sums;  // decay, -decay n, beta n, decay m
  float of_delta;  // m (q k)
};

struct Norms {
  float q, k, product;
};

// Eight numbers of a row: those of `words` and of those 64 further.
JETRL_DEVICE void widen(float (&x)[8], const uint2 (&words)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    x[4 * half] = sm90::low_half(words[half].x), x[4 * half + 1] = sm90::high_half(words[half].x);
    x[4 * half + 2] = sm90::low_half(words[half].y), x[4 * half + 3] = sm90::high_half(words[half].y);
  }
}

JETRL_DEVICE void load_row(uint2 (&words)[2], const uint16_t* row) {
  words[0] = *reinterpret_cast<const uint2*>(row);
  words[1] = *reinterpret_cast<const uint2*>(row + kHead / 2);
}

JETRL_DEVICE float product_of(const float (&x)[8], const float (&y)[8]) {
  float sum = sm90::multiply(x[0], y[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = sm90::multiply_add(x[i], y[i], sum);
  return sum;
}

JETRL_DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x = sm90::add(x, sm90::shuffle_xor(x, mask));
  return x;
}

JETRL_DEVICE Norms norms_of(const float (&q)[8], const float (&k)[8]) {
  constexpr float kScale = 0x1.6a09e6p-4f, kEps = 1e-6f;  // 128^-1/2
  const float of_q = sum_of_lanes(product_of(q, q)), of_k = sum_of_lanes(product_of(k, k));
  return {sm90::multiply(sm90::reciprocal_root(sm90::add(of_q, kEps)), kScale),
          sm90::reciprocal_root(sm90::add(of_k, kEps)), sum_of_lanes(product_of(q, k))};
}

JETRL_DEVICE float as_bf16(float x) { return sm90::float_of(sm90::pack_bf16(0.0f, x)); }

JETRL_DEVICE Factors factors_of(const Norms& norms, float b, float a, float a_log, float dt_bias) {
  const float x = sm90::add(a, dt_bias);
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  const float decay = expf(sm90::multiply(-expf(as_bf16(a_log)), softplus));
  const float beta = sm90::reciprocal(sm90::add(1.0f, expf(-b)));
  return {{decay, sm90::multiply(-decay, norms.k), sm90::multiply(beta, norms.k), sm90::multiply(decay, norms.q)},
          sm90::multiply(norms.q, norms.product)};
}

// 16 lanes have a token's query and key, and each of them one of the heads that share those.
JETRL_KERNEL void __launch_bounds__(kFactorThreads) sm90_delta_factors(JETRL_GRID_CONSTANT DeltaRule p) {
  const int lane = sm90::thread_index() % kLanes, group = sm90::thread_index() / kLanes, key = sm90::block_column();
  const int token = sm90::block_index() * kFactorTokens + group, heads_of_key = p.heads / p.keys;
  const int64_t row = token < p.tokens ? token : p.tokens - 1;
  const uint16_t* at = p.qkv + row * (2 * p.keys + p.heads) * kHead + key * kHead + 4 * lane;
  uint2 words[2];
  float q[8], k[8];
  load_row(words, at);
  widen(q, words);
  load_row(words, at + p.keys * kHead);
  widen(k, words);
  const Norms norms = norms_of(q, k);
  if (token >= p.tokens) return;
#pragma unroll 1
  for (int i = lane; i < heads_of_key; i += kLanes) {
    const int head = key * heads_of_key + i;
    const Factors factors = factors_of(norms, p.b[row * p.stride_b + head], p.a[row * p.stride_a + head], p.a_log[head],
                                       sm90::bf16_to_float(p.dt_bias[head]));
    const int64_t place = row * p.heads + head;
    *reinterpret_cast<float4*>(p.factors + 4 * place) = factors.of_sums;
    p.factors[4 * int64_t(p.tokens) * p.heads + place] = factors.of_delta;
  }
}

// A token's operands as they lie in memory. `of_sums`: factors, or b and a.
struct Token {
  uint2 q[2], k[2];
  uint16_t v;
  float4 of_sums;
  float of_delta;
};

template <bool kShared>
struct Reader {
  const uint16_t *q, *k, *v;
  const float *first, *second;
  int64_t row, stride_first, stride_second;

  JETRL_DEVICE Reader(const DeltaRule& p, int64_t token, int head, int lane, int value) {
    const int key = head / (p.heads / p.keys);
    row = int64_t(2 * p.keys + p.heads) * kHead;
    q = p.qkv + token * row + key * kHead + 4 * lane;
    k = q + p.keys * kHead;
    v = p.qkv + token * row + (2 * p.keys + head) * kHead + value;
    if (kShared) {
      stride_first = 4 * p.heads, stride_second = p.heads;
      first = p.factors + token * stride_first + 4 * head;
      second = p.factors + 4 * int64_t(p.tokens) * p.heads + token * stride_second + head;
    } else {
      stride_first = p.stride_b, stride_second = p.stride_a;
      first = p.b + token * stride_first + head, second = p.a + token * stride_second + head;
    }
  }

  JETRL_DEVICE Token load() const {
    Token token;
    load_row(token.q, q);
    load_row(token.k, k);
    token.v = *v;
    token.of_sums = kShared ? *reinterpret_cast<const float4*>(first) : float4{*first, 0.0f, 0.0f, 0.0f};
    token.of_delta = *second;
    return token;
  }

  JETRL_DEVICE void advance(bool further) {
    const int64_t step = further ? row : 0;
    q += step, k += step, v += step;
    first += further ? stride_first : 0, second += further ? stride_second : 0;
  }
};

// A thread brings 32 bytes of the query, the key, the block's values or a factor of one token after the other into L2.
struct Prefetch {
  const char* at = nullptr;
  int64_t step = 0;

  template <int kBlockValues, bool kShared>
  JETRL_DEVICE void start(const Reader<kShared>& reader, int thread, int lane, int own_value) {
    constexpr int kSector = 16, kOfHead = kHead / kSector, kOfToken = 2 * kOfHead + kBlockValues / kSector;
    if (thread < kOfToken) {
      const uint16_t* operand = thread < 2 * kOfHead ? (thread < kOfHead ? reader.q : reader.k) - 4 * lane
                                                     : reader.v - own_value;
      at = reinterpret_cast<const char*>(operand + thread % kOfHead * kSector), step = 2 * reader.row;
    } else if (thread == kOfToken) {
      at = reinterpret_cast<const char*>(reader.first), step = 4 * reader.stride_first;
    } else if (thread == kOfToken + 1) {
      at = reinterpret_cast<const char*>(reader.second), step = 4 * reader.stride_second;
    }
  }

  JETRL_DEVICE void next() {
    at += step;
    if (step != 0) sm90::prefetch_l2(at);
  }
};

// Adds to a lane's kSums sums those of the lane kApart further. As long as there are two, a lane keeps one half of them
// and gives the other away; a single one both lanes add.
template <int kApart, int kSums>
JETRL_DEVICE void add_lanes(float* x, int lane) {
  if constexpr (kSums == 1) {
    x[0] = sm90::add(x[0], sm90::shuffle_xor(x[0], kApart));
  } else {
    constexpr int kKept = kSums / 2;
    const int upper = lane & kApart;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float kept = sm90::choose(upper, x[i + kKept], x[i]), given = sm90::choose(upper, x[i], x[i + kKept]);
      x[i] = sm90::add(kept, sm90::shuffle_xor(given, kApart));
    }
  }
  if constexpr (kApart > 1) add_lanes<kApart / 2, (kSums + 1) / 2>(x, lane);
}

template <bool kShared, int kValues, int kWarps>
JETRL_KERNEL void __launch_bounds__(32 * kWarps, kValues < 8 ? 4 : kShared ? 8 : 6)
    sm90_delta_rule(JETRL_GRID_CONSTANT DeltaRule p) {
  constexpr int kBlockValues = 2 * kValues * kWarps, kSlices = kHead / kBlockValues;
  constexpr int kOwners = kLanes / 2 / kValues;  // lanes that end with the sums of one value
  const int thread = sm90::thread_index(), lane = thread % kLanes, half = thread % 32 & kLanes;
  const int slice = sm90::block_index() % kSlices, head = sm90::block_index() / kSlices % p.heads;
  const int sequence = sm90::block_index() / kSlices / p.heads;
  // Value i of 16 lanes is that of lanes kOwners i and further, for the sum with k, and 8 lanes on, for that with q.
  const int own = lane % (kLanes / 2), first_value = slice * kBlockValues + thread / kLanes * kValues;
  const int value = first_value + own / kOwners;
  const bool writes = lane >= kLanes / 2 && lane % kOwners == 0;
  const bool paged = p.states != nullptr;
  sm90::wait_for_previous_kernel();
  // The blocks after those of the sequences write zeros after the last sequence.
  const bool last_of_all = sequence == p.sequences;
  const int begin = p.cu_seqlens[sequence], end = last_of_all ? p.tokens : p.cu_seqlens[sequence + 1];
  const int64_t slot = last_of_all ? -1 : paged ? p.slots[sequence] : 0;
  if (begin >= end) return;
  uint16_t* out = p.out + (int64_t(begin) * p.heads + head) * kHead + value;
  const int64_t out_row = int64_t(p.heads) * kHead;
  if (slot < 0) {
#pragma unroll 1
    for (int token = begin; token < end; ++token, out += out_row) {
      if (writes) *out = 0;
    }
    return;
  }

  float s[kValues][8] = {};
  float* state = p.states + slot * p.stride_slot + head * p.stride_head + first_value * kHead + 4 * lane;
  if (paged && p.computed[sequence] > 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float4 low = *reinterpret_cast<const float4*>(state + i * kHead);
      const float4 high = *reinterpret_cast<const float4*>(state + i * kHead + kHead / 2);
      s[i][0] = low.x, s[i][1] = low.y, s[i][2] = low.z, s[i][3] = low.w;
      s[i][4] = high.x, s[i][5] = high.y, s[i][6] = high.z, s[i][7] = high.w;
    }
  }
  const float a_log = kShared ? 0.0f : p.a_log[head], dt_bias = kShared ? 0.0f : sm90::bf16_to_float(p.dt_bias[head]);
  Reader<kShared> reader(p, begin, head, lane, value);
  Prefetch prefetch;
  prefetch.start<kBlockValues>(reader, thread, lane, value - slice * kBlockValues);
#pragma unroll 1
  for (int ahead = 1; ahead < kAhead && begin + ahead < end; ++ahead) prefetch.next();
  Token next = reader.load();
#pragma unroll 1
  for (int token = begin; token < end; ++token, out += out_row) {
    float q[8], k[8];
    widen(q, next.q);
    widen(k, next.k);
    const float v = sm90::bf16_to_float(next.v);
    Factors factors = {next.of_sums, next.of_delta};
    // The next token's operands, while these are used; the last token's are loaded again.
    reader.advance(token + 1 < end);
    next = reader.load();
    if (token + kAhead < end) prefetch.next();
    if (!kShared) factors = factors_of(norms_of(q, k), factors.of_sums.x, factors.of_delta, a_log, dt_bias);

    float sums[2 * kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      sums[i] = product_of(s[i], k);
      sums[kValues + i] = product_of(s[i], q);
    }
    add_lanes<kLanes / 2, 2 * kValues>(sums, lane);
    const float sum = sums[0];
    const float delta = sm90::multiply(sm90::multiply_add(factors.of_sums.y, sum, v), factors.of_sums.z);
    const float own_delta = sm90::shuffle(delta, half + own);
    const float o = sm90::multiply_add(factors.of_sums.w, sum, sm90::multiply(factors.of_delta, own_delta));
    if (writes) *out = uint16_t(sm90::pack_bf16(o, 0.0f));
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float of_value = sm90::shuffle(delta, half + kOwners * i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        s[i][j] = sm90::multiply_add(factors.of_sums.x, s[i][j], sm90::multiply(k[j], of_value));
      }
    }
  }
  if (paged) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      *reinterpret_cast<float4*>(state + i * kHead) = float4{s[i][0], s[i][1], s[i][2], s[i][3]};
      *reinterpret_cast<float4*>(state + i * kHead + kHead / 2) = float4{s[i][4], s[i][5], s[i][6], s[i][7]};
    }
  }
}

template <int kValues, int kWarps>
void launch_rule(const DeltaRule& p, Stream stream) {
  const int blocks = (p.sequences + 1) * p.heads * (kHead / (2 * kValues * kWarps));
  const Grid grid{blocks, 1, 32 * kWarps, 0, stream, true};  // starts while the convolution ends
  if (p.factors != nullptr) {
    launch<sm90_delta_rule<true, kValues, kWarps>>(grid, p);
  } else {
    launch<sm90_delta_rule<false, kValues, kWarps>>(grid, p);
  }
}

}  // namespace

void delta_rule(const DeltaRule& p, Stream stream) {
  if (p.factors != nullptr) {
    launch<sm90_delta_factors>(
        Grid{ceil_div(p.tokens, kFactorTokens), 1, kFactorThreads, 0, stream, false, p.keys}, p);
  }
  // A token takes a warp 420, 250 or 160 instructions for eight, four or two values of 16 lanes.
  const int parts = 4 * p.sequences * p.heads, processors = multiprocessors();  // of 32 values
  if (parts <= processors) {
    launch_rule<2, 4>(p, stream);
  } else if (parts <= 2 * processors) {
    launch_rule<4, 4>(p, stream);
  } else {
    launch_rule<8, 2>(p, stream);
  }
}

}  // namespace jetrl

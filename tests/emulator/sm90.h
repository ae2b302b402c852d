// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The instructions of sm90.cuh on a CPU, modelled after the PTX ISA, so that the kernels' source runs without a GPU. A
// thread is a fiber; a copy happens at a random later moment that the architecture allows, a wgmma or TMA store either
// at once or when it is waited for.
//
// Errors: a deadlock (with what every warp waits for), a surplus arrival, an address outside shared memory, a
// misaligned tile, an invalid tensor map, a read of what the previous kernel may write, a race in shared memory or a
// missing proxy fence (races.h), and a copy between blocks of which one has exited. A missed race still gives wrong
// numbers under some seeds: shared memory starts as NaN.
//
// Not modelled: races in global memory, rounding inside a wgmma (sums are exact here), speed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "qdata.h"

#define JETRL_KERNEL
// Inlined, so that a returned value is an assignment, which the sanitizer instruments.
#define JETRL_DEVICE inline __attribute__((always_inline))
#define JETRL_GRID_CONSTANT const
#define __launch_bounds__(...)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace sm90 {

struct TensorMap {
  const uint8_t* data;
  int64_t columns, rows, row_stride;  // elements, rows, bytes
  int box_rows;
  int element = 1, box_columns = jetrl::kGroup;  // boxes of 128 bytes a row are swizzled, those of scales are not

  bool swizzled() const { return element == 1; }
  int box_bytes() const { return box_rows * box_columns * element; }
};

// Implemented by instructions.cpp.
int thread_index();
inline int thread_index_reread() { return thread_index(); }
int block_index();
int block_column();
int grid_size();
int rank_in_cluster();
uint8_t* dynamic_shared_memory();
uint32_t shared_address(const void* pointer);

// Stricter than a GPU: a cluster's barrier, which is relaxed here, orders nothing but initializations.
void sync_warp();
void sync_block();
void sync_cluster();
void wait_for_previous_kernel();

// An mbarrier has its phase, pending arrivals and (possibly negative) pending bytes; a wait names a parity only. Laxer
// than a GPU: an arrival at another block's barrier orders what its thread did, as one at its own barrier does; the
// other block then overwrites what was read here.
void barrier_init(uint32_t barrier, int arrivals);
void fence_barrier_init();
void fence_for_copies();
void barrier_arrive(uint32_t barrier);
void barrier_arrive_at(uint32_t barrier, int rank);
void barrier_arrive_expect(uint32_t barrier, int bytes);
void barrier_wait(uint32_t barrier, uint32_t parity, const char* name, int stage);

// Tile loads with the 128-byte swizzle, zero fill and multicast; each destination block has its own time, as
// does a bulk copy, also to another block of the cluster. A store reads shared memory at its group's end or its wait.
// cp.async is in program order per thread, as are the arrival that follows it and the wait for it.
void tma_load(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier);
void tma_load_multicast(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier, uint16_t blocks);
void tma_store(const TensorMap* map, uint32_t from, int column, int row);
void tma_store_commit();
void tma_store_wait_read();
void cp_async_f32(uint32_t to, const float* from, bool valid);
void cp_async_16(uint32_t to, const void* from, bool valid);
void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier);
void bulk_copy_in_cluster(uint32_t to, uint32_t from, int bytes, uint32_t barrier);
void cp_async_wait();
void cp_async_arrive(uint32_t barrier);

// Operands are read through the descriptor at the group's end, where no older one runs, or at the wait; results are NaN
// until then.
void issue_wgmma(float* d, int n, uint64_t a, uint64_t b, bool keep);
void wgmma_commit();
void wait_for_wgmma(int pending);

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// The operand of `lane` of this warp. Stricter than a GPU: an exchange orders no memory.
uint32_t exchange(uint32_t value, int lane);
int count_true(bool value);
void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed);
void stmatrix(uint32_t address, const uint32_t (&r)[4], bool transposed);

inline void prefetch_tensor_map(const TensorMap*) {}
void wgmma_fence();
template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void give_registers() {}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { ldmatrix(r, address, false); }
inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) { ldmatrix(r, address, true); }
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  stmatrix(address, {r0, r1, r2, r3}, false);
}
inline void stmatrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  stmatrix(address, {r0, r1, r2, r3}, true);
}

inline bool elect_one() { return thread_index() % 32 == 0; }

// As on the hardware, a block's own addresses are below 1 << 24.
inline uint32_t address_in_cluster(uint32_t address, int rank) { return address | uint32_t(rank) << 24; }
inline void barrier_arrive_in_cluster(uint32_t barrier) { barrier_arrive_at(barrier & 0xFFFFFF, int(barrier >> 24)); }

inline int warp_uniform(int value) { return int(exchange(uint32_t(value), 0)); }
inline int shuffle(int value, int lane) { return int(exchange(uint32_t(value), lane)); }

template <int kPending, int kRegisters>
inline void wgmma_wait(float (&)[kRegisters]) {
  wait_for_wgmma(kPending);
}
template <int kPending, int kChains, int kRegisters>
inline void wgmma_wait(float (&)[kChains][kRegisters]) {
  wait_for_wgmma(kPending);
}
template <int N>
inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool keep) {
  issue_wgmma(d, N, a, b, keep);
}

inline uint32_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return round_to_bf16(low) | round_to_bf16(high) << 16; }
inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float low_half(uint32_t word) { return float_of(word << 16); }
inline float high_half(uint32_t word) { return float_of(word & 0xFFFF0000u); }
inline float2 decode_two(uint16_t qdata) { return {value_of_code(qdata & 0xFF), value_of_code(qdata >> 8)}; }
inline uint32_t encode_four(float a, float b, float c, float d) {
  return code_of_value(a) | code_of_value(b) << 8 | code_of_value(c) << 16 | uint32_t(code_of_value(d)) << 24;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
inline uint32_t permute_bytes_and_signs(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result = permute_bytes(a, b, selector);
  for (int i = 0; i < 4; ++i) {
    if (selector >> 4 * i & 8) result = (result & ~(0xFFu << 8 * i)) | (result >> 8 * i & 0x80 ? 0xFFu : 0u) << 8 * i;
  }
  return result;
}
inline float larger_magnitude(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return float_of(0x7FFFFFFF);
  return std::fmax(a, std::fabs(b));
}
inline float reciprocal_about(float x) { return 1.0f / x; }
inline float choose(int condition, float a, float b) { return condition ? a : b; }
inline float reciprocal(float x) { return 1.0f / x; }
inline float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
inline void prefetch_l2(const void*) {}
inline float without_subnormals(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_about(float x) { return without_subnormals(float(std::exp2(double(x)))); }
inline uint32_t larger_pair(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0x7FFF, b & 0x7FFF), high = std::max(a >> 16 & 0x7FFF, b >> 16 & 0x7FFF);
  return low | high << 16 | ((a ^ b) & 0x80008000);
}
inline uint4 load_16(const uint16_t* from) { return *reinterpret_cast<const uint4*>(from); }
inline int own_lane() { return thread_index() % 32; }
inline int shuffle_up(int value, int step) {
  return int(exchange(uint32_t(value), own_lane() < step ? own_lane() : own_lane() - step));
}
inline uint32_t shuffle_xor(uint32_t value, int mask) { return exchange(value, own_lane() ^ mask); }
inline float shuffle_xor(float value, int mask) { return float_of(shuffle_xor(bits_of(value), mask)); }
inline float shuffle(float value, int lane) { return float_of(exchange(bits_of(value), lane)); }
inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float add(float a, float b) { return a + b; }
inline float multiply_ftz(float a, float b) {
  return without_subnormals(without_subnormals(a) * without_subnormals(b));
}
inline float multiply_add_ftz(float a, float b, float c) {
  return without_subnormals(std::fmaf(without_subnormals(a), without_subnormals(b), without_subnormals(c)));
}
inline float add_ftz(float a, float b) { return without_subnormals(without_subnormals(a) + without_subnormals(b)); }
inline float larger_ftz(float a, float b) { return std::fmax(without_subnormals(a), without_subnormals(b)); }
inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return pack_bf16(bf16_to_float(a & 0xFFFF) * bf16_to_float(b & 0xFFFF), bf16_to_float(a >> 16) * bf16_to_float(b >> 16));
}

}  // namespace sm90

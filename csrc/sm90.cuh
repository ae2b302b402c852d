// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The Hopper instructions that the kernels use, one function each: the only file with PTX.
//
// Shared-memory addresses are 32-bit; waits have a name, so that a debug build (-DJETRL_DEBUG) reports the barrier that
// a hung kernel waits for before it traps. Under JETRL_EMULATE the same functions come from tests/emulator/sm90.h and
// run on a CPU, so kernels must reach the hardware through this file alone.

#pragma once

#ifdef JETRL_EMULATE
#include "emulator/sm90.h"
#else

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>

#include "gemm.h"

#define JETRL_KERNEL __global__
#define JETRL_DEVICE __device__ __forceinline__
#define JETRL_GRID_CONSTANT const __grid_constant__

namespace sm90 {

using TensorMap = CUtensorMap;

// ---- thread and warp indices ---------------------------------------------------------------------------------------

JETRL_DEVICE int thread_index() { return threadIdx.x; }
// The same, read again, where keeping it would take one register too many.
JETRL_DEVICE int thread_index_reread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
JETRL_DEVICE int block_index() { return blockIdx.x; }
JETRL_DEVICE int block_column() { return blockIdx.y; }
JETRL_DEVICE int grid_size() { return gridDim.x; }
JETRL_DEVICE int rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

JETRL_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// The block's dynamic shared memory; operand tiles need it to start on a multiple of 1024.
JETRL_DEVICE uint8_t* dynamic_shared_memory() {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (shared_address(memory) % 1024 != 0) __trap();
  return memory;
}

// The same value in every lane, kept in a uniform register.
JETRL_DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Whether this is the one lane that acts for a full warp; always the same one. Unlike with `lane == 0` the compiler
// knows that a single thread runs, and puts no loop over lanes around instructions with uniform registers, such as the
// copy engine's.
JETRL_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- barriers among threads ----------------------------------------------------------------------------------------

JETRL_DEVICE void sync_warp() { __syncwarp(); }
JETRL_DEVICE void sync_block() { __syncthreads(); }

// Relaxed: it publishes no data, and a release would wait for every store in flight. fence_barrier_init publishes
// initialized barriers.
JETRL_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- the previous kernel -------------------------------------------------------------------------------------------

// Waits until the previous kernel in the stream has ended and this thread, by any kind of load, can read all it wrote.
// Returns at once in a launch that does not overlap with that kernel (gemm.h, Grid).
JETRL_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- mbarriers -----------------------------------------------------------------------------------------------------

JETRL_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and, with a following cluster barrier, to other blocks.
JETRL_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

JETRL_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival on the barrier at the same place in block `rank` of the cluster (which may be this one). It orders this
// block's accesses only, which suffices: the other block may then overwrite tiles that wgmma here has finished reading
// (wgmma_wait). With .release.cluster the compiler would put a device-wide fence into the main loop.
JETRL_DEVICE void barrier_arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// The cluster-wide address of `address` in block `rank` (which may be this one); offsets in bytes stay the same.
JETRL_DEVICE uint32_t address_in_cluster(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// barrier_arrive_at with an address of address_in_cluster.
JETRL_DEVICE void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the phase now also waits for `bytes` from the copy engine.
JETRL_DEVICE void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is over; may suspend the thread for a while before it returns false.
JETRL_DEVICE bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits until the phase of `parity` is over. On a new barrier the phase before the first (parity 1) counts as over.
JETRL_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity, [[maybe_unused]] const char* name,
                               [[maybe_unused]] int stage) {
#ifdef JETRL_DEBUG
  constexpr long long kPatience = 2'000'000'000;  // cycles: about a second
  const long long start = clock64();
  while (!barrier_try_wait(barrier, parity)) {
    if (clock64() - start > kPatience) {
      if (threadIdx.x % 32 == 0) {
        printf("jetrl: block %d (rank %d in its cluster) warp %d waits for %s[%d], parity %u\n", int(blockIdx.x),
               rank_in_cluster(), int(threadIdx.x / 32), name, stage, parity);
      }
      const long long said = clock64();
      while (clock64() - said < kPatience / 4) __nanosleep(1000);  // other threads may report too
      __trap();
    }
  }
#else
  while (!barrier_try_wait(barrier, parity)) {
  }
#endif
}

// ---- copies into shared memory -------------------------------------------------------------------------------------

JETRL_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box whose first element is (column, row); out-of-range elements arrive as zeros and count as bytes.
JETRL_DEVICE void tma_load(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same into the same place of every block of the cluster whose bit is set, completing on each one's own barrier.
JETRL_DEVICE void tma_load_multicast(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier,
                                     uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// From shared memory, swizzled like an operand tile, to the box whose first element is (column, row); nothing is
// written outside the matrix. Joins this thread's open group, which tma_store_commit closes.
JETRL_DEVICE void tma_store(const TensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}
JETRL_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the copy engine has read the sources of this thread's stores; also needed before the thread ends.
JETRL_DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders this thread's writes to shared memory before reads of the copy engine, for a thread that it then syncs with.
JETRL_DEVICE void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One FP32 value, or zero where `valid` is false (`from` is not read then). Completes with cp_async_arrive.
JETRL_DEVICE void cp_async_f32(uint32_t to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// 16 bytes, or zeros where `valid` is false (`from` is not read then); both addresses on multiples of 16.
JETRL_DEVICE void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// `bytes` contiguous bytes, a multiple of 16 like both addresses; they count on the barrier.
JETRL_DEVICE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier)
      : "memory");
}

// From this block's shared memory to `to`, `bytes` as above; they count on `barrier` of the same block (both
// address_in_cluster). `from` is read until they have arrived.
JETRL_DEVICE void bulk_copy_in_cluster(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Waits until all of this thread's earlier cp_async have landed; for other threads' a sync must follow.
JETRL_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One arrival on the barrier, which must count it, once all of this thread's earlier cp_async have landed.
JETRL_DEVICE void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- tensor cores --------------------------------------------------------------------------------------------------

// Orders earlier accesses to accumulator registers before the wgmma that follow.
JETRL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JETRL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending committed groups run; uses of `d`, which the finished ones wrote, may not move up.
template <int kPending, int kRegisters>
JETRL_DEVICE void wgmma_wait(float (&d)[kRegisters]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same where a group holds several chains.
template <int kPending, int kChains, int kRegisters>
JETRL_DEVICE void wgmma_wait(float (&d)[kChains][kRegisters]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int c = 0; c < kChains; ++c) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[c][i])::"memory");
  }
}

// D[64 x N] (+)= A[64 x 32] B[N x 32]^T, E4M3 from shared memory; `keep` false starts from zero.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define R8(a, b, c, e, f, g, h, i) "%" #a ",%" #b ",%" #c ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i
#define R16_0 R8(0, 1, 2, 3, 4, 5, 6, 7) "," R8(8, 9, 10, 11, 12, 13, 14, 15)
#define R16_1 R8(16, 17, 18, 19, 20, 21, 22, 23) "," R8(24, 25, 26, 27, 28, 29, 30, 31)
#define R16_2 R8(32, 33, 34, 35, 36, 37, 38, 39) "," R8(40, 41, 42, 43, 44, 45, 46, 47)
#define R16_3 R8(48, 49, 50, 51, 52, 53, 54, 55) "," R8(56, 57, 58, 59, 60, 61, 62, 63)
#define R16_4 R8(64, 65, 66, 67, 68, 69, 70, 71) "," R8(72, 73, 74, 75, 76, 77, 78, 79)
#define R16_5 R8(80, 81, 82, 83, 84, 85, 86, 87) "," R8(88, 89, 90, 91, 92, 93, 94, 95)
#define WGMMA(shape, registers, outputs, a_at, b_at, keep_at)                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_at ", 0;\n"                                          \
               "wgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 {" registers "}, " a_at ", " b_at       \
               ", p, 1, 1;\n}"                                                                               \
               : outputs                                                                                     \
               : "l"(a), "l"(b), "r"(int(keep)))

template <int N>
JETRL_DEVICE void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool keep) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64 || N == 128 || N == 192, "a width not listed below");
#define COMMA ,
  if constexpr (N == 16) {
    WGMMA("m64n16k32", R8(0, 1, 2, 3, 4, 5, 6, 7), D8(0), "%8", "%9", "%10");
  } else if constexpr (N == 32) {
    WGMMA("m64n32k32", R16_0, D16(0), "%16", "%17", "%18");
  } else if constexpr (N == 48) {
    WGMMA("m64n48k32", R16_0 "," R8(16, 17, 18, 19, 20, 21, 22, 23), D16(0) COMMA D8(16), "%24", "%25", "%26");
  } else if constexpr (N == 64) {
    WGMMA("m64n64k32", R16_0 "," R16_1, D32(0), "%32", "%33", "%34");
  } else if constexpr (N == 128) {
    WGMMA("m64n128k32", R16_0 "," R16_1 "," R16_2 "," R16_3, D32(0) COMMA D32(32), "%64", "%65", "%66");
  } else {
    WGMMA("m64n192k32", R16_0 "," R16_1 "," R16_2 "," R16_3 "," R16_4 "," R16_5, D32(0) COMMA D32(32) COMMA D32(64),
          "%96", "%97", "%98");
  }
#undef COMMA
}

#undef WGMMA
#undef R16_5
#undef R16_4
#undef R16_3
#undef R16_2
#undef R16_1
#undef R16_0
#undef R8
#undef D32
#undef D16
#undef D8
#undef D4

// D[16 x 8] += A[16 x 16] B[8 x 16]^T of a warp, BF16 from registers. Lane l holds rows l / 4 and l / 4 + 8 of A and D,
// row l / 4 of B; along K places 2 (l % 4) and the next in the first half of its registers, 8 more in the second. On
// Hopper all 16 products and D are one sum, as in wgmma: their order along K is free.
JETRL_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Registers per thread of this warpgroup from here on; every warp of it must pass here.
template <int kRegisters>
JETRL_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
JETRL_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- from fragments to memory --------------------------------------------------------------------------------------

// Two FP32 values rounded to nearest even, the first in the low half.
JETRL_DEVICE uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
JETRL_DEVICE float bf16_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

JETRL_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
JETRL_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
JETRL_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }

// Subnormal operands and results are zeros, as in code built with --use_fast_math.
JETRL_DEVICE float multiply_ftz(float a, float b) {
  float r;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
JETRL_DEVICE float multiply_add_ftz(float a, float b, float c) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
JETRL_DEVICE float add_ftz(float a, float b) {
  float r;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
JETRL_DEVICE float larger_ftz(float a, float b) {  // the other one where one is NaN
  float r;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Products of two pairs of BF16 numbers, rounded to BF16, subnormal numbers included.
JETRL_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// ---- qdata ---------------------------------------------------------------------------------------------------------

// The values of two E4M3 qdata, that of the low byte first.
JETRL_DEVICE float2 decode_two(uint16_t qdata) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(qdata));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// E4M3 qdata to nearest even, 448 at most, that of `a` in the low byte; NaN gives 0x7F.
JETRL_DEVICE uint32_t encode_four(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Byte i of the result is byte (nibble i of the selector) of b:a, a the lower four.
JETRL_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// The same; a nibble plus 8 gives the sign of its byte in all bits.
JETRL_DEVICE uint32_t permute_bytes_and_signs(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// The larger of `a` and |b|, NaN where one of them is.
JETRL_DEVICE float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(fabsf(b)));
  return larger;
}

// 1 / x within one unit in the last place, for normal x.
JETRL_DEVICE float reciprocal_about(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// `a` where `condition` is not 0, else `b`; the compiler may branch on a conditional expression.
JETRL_DEVICE float choose(int condition, float a, float b) {
  float chosen;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}" : "=f"(chosen) : "f"(a), "f"(b), "r"(condition));
  return chosen;
}

// 1 / x and 1 / the root of x, each operation rounded to nearest.
JETRL_DEVICE float reciprocal(float x) { return __frcp_rn(x); }
JETRL_DEVICE float reciprocal_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }

// 2^x within two units in the last place; 0 where that is subnormal.
JETRL_DEVICE float exp2_about(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Per half of two words, the BF16 number of larger magnitude, NaN where one is; with an arbitrary sign.
JETRL_DEVICE uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

JETRL_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
JETRL_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

// The BF16 numbers in the halves of a word.
JETRL_DEVICE float low_half(uint32_t word) { return float_of(word << 16); }
JETRL_DEVICE float high_half(uint32_t word) { return float_of(word & 0xFFFF0000u); }

JETRL_DEVICE int own_lane() { return threadIdx.x % 32; }

// The value of the lane whose number differs in the bits of `mask`.
JETRL_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
JETRL_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// By a whole warp: the value of lane `lane`, of the lane `step` before (its own value where there is none), the number
// of lanes with true.
JETRL_DEVICE int shuffle(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
JETRL_DEVICE float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
JETRL_DEVICE int shuffle_up(int value, int step) { return __shfl_up_sync(0xffffffffu, value, step); }
JETRL_DEVICE int count_true(bool value) { return __popc(__ballot_sync(0xffffffffu, value)); }

// Brings the 32 bytes at `from` into the L2 cache.
JETRL_DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// 16 bytes that nothing writes while the kernel runs.
JETRL_DEVICE uint4 load_16(const uint16_t* from) { return __ldg(reinterpret_cast<const uint4*>(from)); }

// Four 8x8 matrices of 16-bit values: r[i] is matrix i's fragment; lanes 8i..8i+7 give the addresses of its rows. Lane
// l holds row l / 4, columns 2 (l % 4) and the next; of a transposed one column l / 4 and two rows.
JETRL_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
JETRL_DEVICE void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
JETRL_DEVICE void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
JETRL_DEVICE void stmatrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace sm90

#endif  // JETRL_EMULATE

// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The instructions of emulator/sm90.h, as the fiber that runs them executes them, and what orders each (races.h).

#include "machine.h"
#include "tensor_core.h"

using namespace emulator;

namespace {

// ---- who knows what (races.h) --------------------------------------------------------------------------------------

std::string described(const char* what, int block, int thread) {
  return std::string(what) + " of block " + std::to_string(block) + " warp " + std::to_string(thread / 32) + " lane " +
         std::to_string(thread % 32);
}

std::string described(const Access& access) { return described(access.what, access.block, access.thread); }

// An access that this thread requests and the machine makes later.
int begin(const char* what, bool write, bool by_thread) {
  machine.accesses.push_back({what, machine.current->block, machine.current->thread, write, by_thread});
  return int(machine.accesses.size()) - 1;
}

void end(std::vector<int>& accesses, uint32_t entry, uint32_t time) {
  for (const int access : accesses) machine.accesses[access].end(entry, time);
  accesses.clear();
}

// The access begins here, as far as its thread knows.
void touch(Block& of, int access, uint32_t address, uint32_t bytes) {
  const int met = of.history.touch(machine.accesses, access, address - kFirstAddress, bytes, machine.current->knows);
  if (met != -1) {
    fail("a race at " + std::to_string(address) + ": " + described(machine.accesses[access]) + ", not ordered after " +
         described(machine.accesses[met]));
  }
}

// This thread's own access, complete at once.
void touch_now(Fiber& fiber, bool write, uint32_t address, uint32_t bytes) {
  int& access = write ? fiber.writing : fiber.reading;
  if (access == -1) {
    access = begin(write ? "a write" : "a read", write, true);
    machine.accesses[access].end(fiber.entry, fiber.knows.plain[fiber.entry]);
  }
  touch(block(), access, address, bytes);
}

// What this thread does from here on is not in what it has published.
void begin_time() {
  Fiber& fiber = *machine.current;
  fiber.knows.order[fiber.entry] = ++fiber.knows.plain[fiber.entry];
  fiber.reading = fiber.writing = -1;
}

void tell(Knowledge& told) {
  told.join(machine.current->knows);
  begin_time();
}

// A copy's writes are known to be complete when the phase in which its bytes or its arrival count is.
uint32_t time_of_phase(const Barrier& barrier) { return 2 + barrier.phase; }

// ---- parts of instructions ------------------------------------------------------------------------------------------

// A read by a thread that cannot know whether the previous kernel has ended.
void check_written(const void* from) {
  for (const auto& [begin, end] : machine.fresh) {
    if (!machine.current->waited && from >= begin && from < end) fail("a read before the previous kernel has ended");
  }
}
void check_read(const void* from, int bytes) {
  check_written(from);
  bool inside = machine.given.empty();
  for (const auto& [begin, end] : machine.given) {
    inside = inside || (from >= begin && static_cast<const uint8_t*>(from) + bytes <= end);
  }
  if (!inside) fail("a copy from memory that is no argument's");
}

uint8_t* at(Block& of, uint32_t address, int bytes) {
  if (address < kFirstAddress || address + bytes > kFirstAddress + uint32_t(machine.shared_bytes)) {
    machine.error = "an access outside shared memory, at " + std::to_string(address);
    return of.memory;  // of a dying machine
  }
  return of.memory + (address - kFirstAddress);
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

void check_phase(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    for (const auto& [entry, time] : barrier.waits) {
      if (barrier.told.order[entry] < time && machine.error.empty()) {
        const Fiber& late = *machine.fibers[entry];
        machine.error = described("a wait", late.block, late.thread) +
                        " for an mbarrier's phase, not ordered before the end of the next phase";
      }
    }
    barrier.waits.clear();
    ++barrier.phase;
    barrier.pending = barrier.count;
    barrier.passed = barrier.told;
  }
}

Barrier* find(Block& of, uint32_t address) {
  const auto it = of.barriers.find(address);
  if (it == of.barriers.end()) {
    machine.error = "no barrier was initialised at " + std::to_string(address);
    return nullptr;
  }
  return &it->second;
}

void arrive(Block& of, uint32_t address) {
  Barrier* barrier = find(of, address);
  if (barrier == nullptr) return;
  if (barrier->pending == 0) {
    machine.error = "an arrival too many at the barrier at " + std::to_string(address);
    return;
  }
  --barrier->pending;
  check_phase(*barrier);
}

// A barrier that this thread is about to use.
Barrier& known(Block& of, uint32_t address) {
  Barrier* barrier = find(of, address);
  if (barrier == nullptr) fail(machine.error);
  if (machine.current->knows.plain[barrier->entry] == 0) {
    fail("a thread does not know that the barrier at " + std::to_string(address) + " is initialised");
  }
  return *barrier;
}

// An arrival, a copy's bytes or a wait by a thread that knew `known` of the barrier. Fails if it belongs to this phase
// only in this run: without knowing that the previous phase is over it could have come before its end.
void check_belongs(uint32_t known, uint32_t phases_before, const char* what) {
  if (known < 1 + phases_before && machine.error.empty()) {
    machine.error = std::string(what) + " at an mbarrier by who does not know that the phase before is over";
  }
}

// With what the thread knows.
void arrive_and_tell(Block& of, uint32_t address) {
  Barrier& barrier = known(of, address);
  // At another block's barrier the phases are ordered by bytes, which publish nothing here.
  if (&of == &block()) check_belongs(machine.current->knows.plain[barrier.entry], barrier.phase, "an arrival");
  tell(barrier.told);
  arrive(of, address);
}

void compute(const Fiber& fiber, const Wgmma& op) {
  Block& of = machine.blocks[fiber.block];
  for (const uint64_t descriptor : {op.a, op.b}) {
    if (descriptor >> 62 != 1 || (descriptor >> 32 & 0x3FFF) != 64 || (descriptor >> 49 & 7) != 0) {
      machine.error = "a descriptor that is not a K-major tile under the 128-byte swizzle";
      return;
    }
  }
  const auto code = [&of](uint64_t descriptor, int row, int k) {
    const uint32_t start = uint32_t(descriptor & 0x3FFF) << 4, stride = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
    return sm90::value_of_code(*at(of, swizzled(start + row / 8 * stride + row % 8 * 128 + k), 1));
  };
  const int lane = fiber.thread % 32, warp = fiber.thread / 32 % 4;
  for (int half = 0; half < 2; ++half) {
    float a[32];
    for (int k = 0; k < 32; ++k) a[k] = code(op.a, 16 * warp + lane / 4 + 8 * half, k);
    for (int n8 = 0; n8 < op.n / 8; ++n8) {
      for (int i = 0; i < 2; ++i) {
        float& d = op.d[4 * n8 + 2 * half + i];
        double sum = op.keep ? d : 0.0;
        for (int k = 0; k < 32; ++k) sum += double(a[k]) * code(op.b, 8 * n8 + 2 * (lane % 4) + i, k);
        d = float(sum);
      }
    }
  }
}

enum class Passes { kAll, kInitialisations, kOrder };

void join_and_wait(Meeting& meeting, int expected, const char* what, Passes passes) {
  Knowledge& knows = machine.current->knows;
  if (passes == Passes::kAll) {
    tell(meeting.told);
  } else {
    Knowledge::join(meeting.told.order, knows.order);
    begin_time();
  }
  if (passes == Passes::kInitialisations) {
    for (const uint32_t entry : machine.current->initialised) {
      uint32_t& told = meeting.told.plain[entry];
      told = std::max(told, std::min(knows.plain[entry], 1u));
    }
  }
  const uint64_t generation = meeting.generation;
  ++meeting.arrived;
  settle(meeting, expected);
  wait_until([&meeting, generation] { return meeting.generation != generation; }, what);
  knows.join(meeting.passed);
}

// A copy's bytes count on the barrier. `known`: what the requesting thread knew of the barrier.
void arrived(Block& of, uint32_t barrier, int bytes, int access, uint32_t known, const char* what) {
  if (Barrier* mbarrier = find(of, barrier)) {
    machine.accesses[access].end(mbarrier->entry, time_of_phase(*mbarrier));
    check_belongs(known, mbarrier->phase, what);
    mbarrier->bytes -= bytes;
    check_phase(*mbarrier);
  }
}

void load(int to_block, uint32_t to, const sm90::TensorMap& map, int column, int row, uint32_t barrier, int access,
          uint32_t known) {
  Block& of = machine.blocks[to_block];
  const int width = map.box_columns * map.element;
  for (int r = 0; r < map.box_rows; ++r) {
    for (int byte = 0; byte < width; ++byte) {
      const int c = column + byte / map.element;
      const bool inside = row + r >= 0 && row + r < map.rows && c >= 0 && c < map.columns;
      const uint32_t address = to + r * width + byte;
      *at(of, map.swizzled() ? swizzled(address) : address, 1) =
          inside ? map.data[(row + r) * map.row_stride + int64_t(column) * map.element + byte] : uint8_t(0);
    }
  }
  arrived(of, barrier, map.box_bytes(), access, known, "a copy's bytes");
}

void store(Block& of, uint32_t from, const sm90::TensorMap& map, int column, int row) {
  const int width = map.box_columns * map.element;
  for (int r = 0; r < map.box_rows; ++r) {
    for (int byte = 0; byte < width; ++byte) {
      if (row + r >= map.rows || column + byte / map.element >= map.columns) continue;
      uint8_t* to = const_cast<uint8_t*>(map.data) + (row + r) * map.row_stride + int64_t(column) * map.element + byte;
      *to = *at(of, swizzled(from + r * width + byte), 1);
    }
  }
}

}  // namespace

namespace sm90 {

int thread_index() { return machine.current->thread; }
int block_index() { return machine.first_block + machine.current->block; }
int block_column() { return machine.column; }
int grid_size() { return machine.grid; }
int rank_in_cluster() { return machine.current->block; }
uint8_t* dynamic_shared_memory() { return block().memory; }
uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - block().memory) + kFirstAddress;
}

void sync_warp() {
  join_and_wait(block().warps[machine.current->thread / 32].memory, 32, "its warp", Passes::kAll);
}

void sync_block() { join_and_wait(block().meeting, machine.threads, "its block", Passes::kAll); }
void sync_cluster() { join_and_wait(machine.meeting, machine.alive, "its cluster", Passes::kInitialisations); }

void wait_for_previous_kernel() {
  machine.current->waited = true;
  maybe_yield();
}

void barrier_init(uint32_t barrier, int arrivals) {
  if (barrier % 8 != 0) fail("a misaligned mbarrier");
  at(block(), barrier, 8);
  Fiber& fiber = *machine.current;
  const size_t threads = size_t(machine.cluster) * machine.threads, before = block().barriers.size();
  const uint32_t entry = uint32_t(threads + fiber.block * kBarriers + before);
  const auto [place, is_new] = block().barriers.emplace(barrier, Barrier{arrivals, arrivals, entry});
  if (!is_new) fail("an mbarrier is initialised twice");
  if (before == kBarriers) fail("more mbarriers than the emulator keeps");
  place->second.told.resize(fiber.knows.plain.size()), place->second.passed.resize(fiber.knows.plain.size());
  fiber.initialised.push_back(entry);
  touch(block(), begin("an mbarrier", true, true), barrier, 8);  // never complete: nothing else may use the place
}
void fence_barrier_init() {
  Fiber& fiber = *machine.current;
  for (const uint32_t entry : fiber.initialised) fiber.knows.plain[entry] = 1;
}
// Later writes of the thread have another time and are not fenced.
void fence_for_copies() {
  machine.current->knows.copies = machine.current->knows.plain;
  begin_time();
}
void barrier_arrive(uint32_t barrier) {
  arrive_and_tell(block(), barrier);
  maybe_yield();
}
void barrier_arrive_at(uint32_t barrier, int rank) {
  for (const auto& fiber : machine.fibers) {  // other warps of the producer's warpgroup may exit at any time
    if (fiber->block == rank && fiber->done && fiber->thread >= 128) fail("an arrival at a block that has left");
  }
  arrive_and_tell(machine.blocks[rank], barrier);
  maybe_yield();
}
void barrier_arrive_expect(uint32_t barrier, int bytes) {
  known(block(), barrier).bytes += bytes;
  arrive_and_tell(block(), barrier);
  maybe_yield();
}
void barrier_wait(uint32_t barrier, uint32_t parity, const char* name, int stage) {
  Barrier& mbarrier = known(block(), barrier);
  wait_until([&mbarrier, parity] { return (mbarrier.phase & 1) != parity; },
             std::string(name) + "[" + std::to_string(stage) + "] parity " + std::to_string(parity));
  Knowledge& knows = machine.current->knows;
  if (mbarrier.phase > 0) check_belongs(knows.plain[mbarrier.entry], mbarrier.phase - 1, "a wait");
  knows.join(mbarrier.passed);
  knows.plain[mbarrier.entry] = std::max(knows.plain[mbarrier.entry], 1 + mbarrier.phase);
  mbarrier.waits.push_back({machine.current->entry, knows.order[machine.current->entry]});
}

// Anything else is an illegal instruction on the hardware.
void check_column(const TensorMap* map, int column) {
  if (column * map->element % 16 != 0) fail("a box whose rows do not start on 16 bytes of the matrix");
}

void tma_load_multicast(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier, uint16_t blocks) {
  if (map->swizzled() && to % 1024 != 0) fail("an operand tile that does not start on a swizzle atom");
  if (to % 128 != 0) fail("a box that does not start on 128 bytes");
  check_column(map, column);
  check_written(map->data);
  for (int b = 0; b < machine.cluster; ++b) {
    if (blocks >> b & 1) {
      const uint32_t knows = machine.current->knows.plain[known(machine.blocks[b], barrier).entry];
      const int access = begin("the copy engine's load for a thread", true, false);
      touch(machine.blocks[b], access, to, map->box_bytes());
      machine.tiles.push_back([=, map = *map] { load(b, to, map, column, row, barrier, access, knows); });
    }
  }
  maybe_yield();
}
void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) fail("a misaligned bulk copy");
  check_read(from, bytes);
  const int b = machine.current->block;
  const uint32_t knows = machine.current->knows.plain[known(block(), barrier).entry];
  const int access = begin("a bulk copy for a thread", true, false);
  touch(block(), access, to, bytes);
  machine.tiles.push_back([=] {
    Block& of = machine.blocks[b];
    std::memcpy(at(of, to, bytes), from, bytes);
    arrived(of, barrier, bytes, access, knows, "a bulk copy's bytes");
  });
  maybe_yield();
}
void bulk_copy_in_cluster(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) fail("a misaligned bulk copy");
  const int source = machine.current->block, target = int(to >> 24);
  if (target >= machine.cluster || barrier >> 24 != to >> 24) fail("a copy to a block that its barrier is not in");
  to &= 0xFFFFFF, barrier &= 0xFFFFFF;
  const uint32_t knows = machine.current->knows.plain[known(machine.blocks[target], barrier).entry];
  const int read = begin("a bulk copy's read for a thread", false, false);
  touch(machine.blocks[source], read, from, bytes);
  const int write = begin("a bulk copy for a thread", true, false);
  touch(machine.blocks[target], write, to, bytes);
  machine.tiles.push_back([=] {
    for (const int b : {source, target}) {
      const auto stays = [b](const auto& fiber) { return fiber->block == b && !fiber->done; };
      if (std::none_of(machine.fibers.begin(), machine.fibers.end(), stays) && machine.error.empty()) {
        machine.error = "a copy from or to a block that has left";
      }
    }
    std::memcpy(at(machine.blocks[target], to, bytes), at(machine.blocks[source], from, bytes), bytes);
    if (const Barrier* mbarrier = find(machine.blocks[target], barrier)) {
      machine.accesses[read].end(mbarrier->entry, time_of_phase(*mbarrier));
    }
    arrived(machine.blocks[target], barrier, bytes, write, knows, "a bulk copy's bytes");
  });
  maybe_yield();
}
void tma_load(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  tma_load_multicast(to, map, column, row, barrier, uint16_t(1u << machine.current->block));
}
void tma_store(const TensorMap* map, uint32_t from, int column, int row) {
  if (from % 1024 != 0) fail("a box that does not start on a swizzle atom");
  if (column < 0 || row < 0) fail("a box before the matrix");
  check_column(map, column);
  Block* of = &block();
  machine.current->reads_of_stores.push_back(begin("the copy engine's store for a thread", false, false));
  touch(*of, machine.current->reads_of_stores.back(), from, map->box_bytes());
  machine.current->stores.push_back([=, map = *map] { store(*of, from, map, column, row); });
}
void tma_store_commit() {
  Fiber& fiber = *machine.current;
  const bool early = chance(2) && fiber.storing.empty();
  for (auto& one : fiber.stores) {
    if (early) {
      one();
    } else {
      fiber.storing.push_back(std::move(one));
    }
  }
  fiber.stores.clear();
  auto& reads = fiber.reads_of_storing;
  reads.insert(reads.end(), fiber.reads_of_stores.begin(), fiber.reads_of_stores.end());
  fiber.reads_of_stores.clear();
  maybe_yield();
}
void tma_store_wait_read() {
  Fiber& fiber = *machine.current;
  if (chance(2)) yield();
  for (const auto& one : fiber.storing) one();
  fiber.storing.clear();
  end(fiber.reads_of_storing, fiber.entry, fiber.knows.plain[fiber.entry]);
}
void cp_async(uint32_t to, const void* from, uint32_t bytes, bool valid) {
  if (to % bytes != 0 || (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0)) fail("a misaligned cp.async");
  if (valid) check_read(from, int(bytes));
  Block* of = &block();
  machine.current->copying.push_back(begin("a cp.async", true, true));
  touch(*of, machine.current->copying.back(), to, bytes);
  machine.current->copies.push_back([=] {
    const uint8_t zeros[16] = {};
    std::memcpy(at(*of, to, int(bytes)), valid ? from : zeros, bytes);
  });
}
void cp_async_f32(uint32_t to, const float* from, bool valid) { cp_async(to, from, 4, valid); }
void cp_async_16(uint32_t to, const void* from, bool valid) { cp_async(to, from, 16, valid); }
void cp_async_wait() {
  Fiber& fiber = *machine.current;
  wait_until([&fiber] { return fiber.copies.empty(); }, "its copies");
  end(fiber.copying, fiber.entry, fiber.knows.plain[fiber.entry]);
}
void cp_async_arrive(uint32_t barrier) {
  Block* of = &block();
  const uint32_t knows = machine.current->knows.plain[known(*of, barrier).entry];
  Fiber& fiber = *machine.current;
  fiber.copies.push_back([=, copied = std::move(fiber.copying), order = fiber.knows.order]() mutable {
    if (Barrier* mbarrier = find(*of, barrier)) {
      end(copied, mbarrier->entry, time_of_phase(*mbarrier));
      check_belongs(knows, mbarrier->phase, "an arrival of cp.async");
      Knowledge::join(mbarrier->told.order, order);
    }
    arrive(*of, barrier);
  });
  fiber.copying.clear();
  begin_time();
  maybe_yield();
}

// Required between a wait, after which a thread uses the registers, and the next wgmma.
void wgmma_fence() { machine.current->fenced = true; }
void issue_wgmma(float* d, int n, uint64_t a, uint64_t b, bool keep) {
  Fiber& fiber = *machine.current;
  if (!fiber.fenced) fail("a wgmma without a fence after the last use of its registers");
  if (fiber.issued.reads == -1) fiber.issued.reads = begin("wgmma's read for a thread", false, false);
  const auto read = [&](uint64_t descriptor, int first_row, int rows) {
    const uint32_t start = uint32_t(descriptor & 0x3FFF) << 4 & ~1023u;
    touch(block(), fiber.issued.reads, start + first_row * 128, rows * 128);
  };
  for (int row = fiber.thread / 32 % 4 * 16, i = 0; i < 2; ++i, row += 8) {
    if (row < machine.counted_rows) read(a, row, 8);
  }
  read(b, 0, n);
  fiber.issued.instructions.push_back({d, n, a, b, keep});
}
void wgmma_commit() {
  Fiber& fiber = *machine.current;
  const bool early = chance(2);
  if (early && fiber.groups.empty()) {
    for (const Wgmma& op : fiber.issued.instructions) compute(fiber, op);
    fiber.issued.instructions.clear();
  } else {
    for (const Wgmma& op : fiber.issued.instructions) {
      if (!op.keep) std::fill(op.d, op.d + op.n / 2, std::nanf(""));
    }
  }
  fiber.groups.push_back(std::move(fiber.issued));
  fiber.issued = {};
  maybe_yield();
}
void wait_for_wgmma(int pending) {
  Fiber& fiber = *machine.current;
  fiber.fenced = false;
  if (chance(2)) yield();
  while (int(fiber.groups.size()) > pending) {
    Chain& oldest = fiber.groups.front();
    for (const Wgmma& op : oldest.instructions) compute(fiber, op);
    machine.accesses[oldest.reads].end(fiber.entry, fiber.knows.plain[fiber.entry]);
    fiber.groups.pop_front();
  }
}

// Takes this lane's four values, returns those of all lanes.
const uint32_t (*meet(uint32_t r0, uint32_t r1 = 0, uint32_t r2 = 0, uint32_t r3 = 0))[4] {
  Warp& warp = block().warps[machine.current->thread / 32];
  auto& slots = warp.slots[warp.values.generation & 1];
  const uint32_t values[4] = {r0, r1, r2, r3};
  std::memcpy(slots[machine.current->thread % 32], values, sizeof(values));
  join_and_wait(warp.values, 32, "its warp", Passes::kOrder);
  maybe_yield();
  return slots;
}

uint32_t exchange(uint32_t value, int lane) { return meet(value)[lane][0]; }

int count_true(bool value) {
  const auto slots = meet(value);
  int count = 0;
  for (int lane = 0; lane < 32; ++lane) count += int(slots[lane][0]);
  return count;
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto half = [](uint32_t word, int i) { return bf16_to_float(uint16_t(word >> 16 * i)); };
  uint32_t of_a[32][4];
  std::memcpy(of_a, meet(a[0], a[1], a[2], a[3]), sizeof(of_a));
  const auto of_b = meet(b[0], b[1]);
  const int lane = own_lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    float left[16], right[16];
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      left[k] = half(of_a[4 * (row % 8) + pair][2 * (k / 8) + row / 8], k % 2);
      right[k] = half(of_b[4 * column + pair][k / 8], k % 2);
    }
    d[i] = fused_sum(d[i], left, right);
  }
}

// Each lane reads the row at its address, for all lanes.
void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
  if (address % 16 != 0) fail("a misaligned ldmatrix");
  touch_now(*machine.current, false, address, 16);
  const uint32_t* row = reinterpret_cast<const uint32_t*>(at(block(), address, 16));
  const auto rows = meet(row[0], row[1], row[2], row[3]);
  for (int i = 0; i < 8; ++i) {
    const int one = own_lane() / 4, other = 2 * (own_lane() % 4) + i % 2, column = transposed ? one : other;
    const uint32_t half = rows[i / 2 * 8 + (transposed ? other : one)][column / 2] >> column % 2 * 16 & 0xFFFF;
    r[i / 2] = i % 2 == 0 ? half : r[i / 2] | half << 16;
  }
}

// Each lane writes the row at its address when it runs; other lanes may rely on it after a sync_warp.
void stmatrix(uint32_t address, const uint32_t (&r)[4], bool transposed) {
  if (address % 16 != 0) fail("a misaligned stmatrix");
  const int matrix = own_lane() / 8, row = own_lane() % 8;
  const auto slots = meet(r[0], r[1], r[2], r[3]);
  touch_now(*machine.current, true, address, 16);
  uint16_t* to = reinterpret_cast<uint16_t*>(at(block(), address, 16));
  for (int column = 0; column < 8; ++column) {
    const int one = transposed ? column : row, other = transposed ? row : column;
    to[column] = uint16_t(slots[4 * one + other / 2][matrix] >> other % 2 * 16);
  }
}

}  // namespace sm90

// ---- accesses of the kernels' own C++ -------------------------------------------------------------------------------

// Kernels are compiled with -fsanitize=thread, which calls these before each access to memory (not for memcpy, memset);
// they replace its runtime library. With -fsanitize=alignment a misaligned pointer is reported before it is used: a CPU
// tolerates it, a GPU does not.
namespace {

void access(const void* pointer, bool write, int bytes) {
  if (machine.current == nullptr) return;  // host code
  if (!write) check_written(pointer);
  const ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - block().memory;
  if (offset < -kNobodys || offset >= machine.shared_bytes + kNobodys) return;
  if (offset < 0 || offset + bytes > machine.shared_bytes) {
    fail("an access outside shared memory, at " + std::to_string(offset + ptrdiff_t(kFirstAddress)));
  }
  touch_now(*machine.current, write, uint32_t(offset) + kFirstAddress, bytes);
}

}  // namespace

extern "C" {
#define HOOKS(bytes)                                                        \
  void __tsan_read##bytes(void* at) { access(at, false, bytes); }           \
  void __tsan_write##bytes(void* at) { access(at, true, bytes); }           \
  void __tsan_unaligned_read##bytes(void* at) { access(at, false, bytes); } \
  void __tsan_unaligned_write##bytes(void* at) { access(at, true, bytes); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS
void __tsan_read_range(void* at, long bytes) { access(at, false, int(bytes)); }
void __tsan_write_range(void* at, long bytes) { access(at, true, int(bytes)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) {
  if (machine.current != nullptr) fail("a misaligned access");
}
}

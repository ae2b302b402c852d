// Copyright 2026 The jetrl_verl Authors
//
// Licensed under the Apache License, Version 2.0 (the "License");
// you may not use this file except in compliance with the License.
// You may obtain a copy of the License at
//
//     http://www.apache.org/licenses/LICENSE-2.0
//
// Unless required by applicable law or agreed to in writing, software
// distributed under the License is distributed on an "AS IS" BASIS,
// WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
// See the License for the specific language governing permissions and
// limitations under the License.

// The emulated cluster: fibers, barriers, copies in flight (emulator/sm90.h says what is modelled), and a C interface.
//
// One step of the machine is either the next instruction of one runnable thread or one copy in flight; a seed decides
// which, and how unfairly: some warps are made slow, copies are served eagerly, evenly, or only when no thread can go
// on. What a step may be is decided there; whether it was ordered behind what it conflicts with, by races.h.

#include "machine.h"

using namespace emulator;

namespace {

Machine machine;

bool chance(int one_in) { return machine.random() % one_in == 0; }

Block& block() { return machine.blocks[machine.current->block]; }

void yield() { swapcontext(&machine.current->context, &machine.scheduler); }

[[noreturn]] void fail(const std::string& sentence) {
  if (machine.error.empty()) machine.error = sentence;
  for (;;) yield();
}

// ---- who knows what (races.h) --------------------------------------------------------------------------------------

std::string described(const Access& access) {
  return std::string(access.what) + " of block " + std::to_string(access.block) + " warp " +
         std::to_string(access.thread / 32) + " lane " + std::to_string(access.thread % 32);
}

// An access that this thread asks for and the machine makes when it likes.
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
    fail("a race at " + std::to_string(address) + ": " + described(machine.accesses[access]) + ", not ordered behind " +
         described(machine.accesses[met]));
  }
}

// This thread's own access, over at once.
void touch_now(Fiber& fiber, bool write, uint32_t address, uint32_t bytes) {
  int& access = write ? fiber.writing : fiber.reading;
  if (access == -1) {
    access = begin(write ? "a write" : "a read", write, true);
    machine.accesses[access].end(fiber.entry, fiber.knows.plain[fiber.entry]);
  }
  touch(block(), access, address, bytes);
}

// What this thread does from here on is not what it has told.
void begin_time() {
  Fiber& fiber = *machine.current;
  fiber.knows.order[fiber.entry] = ++fiber.knows.plain[fiber.entry];
  fiber.reading = fiber.writing = -1;
}

void tell(Knowledge& told) {
  told.join(machine.current->knows);
  begin_time();
}

// Where a copy's writes are known to be over: when the phase is that its bytes or its arrival count in.
uint32_t time_of_phase(const Barrier& barrier) { return 2 + barrier.phase; }

void wait_until(std::function<bool()> ready, const std::string& what) {
  if (!chance(4) && ready()) return;
  machine.current->ready = std::move(ready);
  machine.current->waits_for = what;
  yield();
  machine.current->ready = nullptr;
}

void maybe_yield() {
  if (chance(64)) yield();
}

// A copy from here, by a thread that cannot know whether the previous kernel has ended.
void check_read(const void* from) {
  for (const auto& [begin, end] : machine.fresh) {
    if (!machine.current->waited && from >= begin && from < end) fail("a copy before the previous kernel has ended");
  }
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
        machine.error = "a wait of block " + std::to_string(late.block) + " warp " + std::to_string(late.thread / 32) +
                        " lane " + std::to_string(late.thread % 32) +
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
  const auto found = of.barriers.find(address);
  if (found == of.barriers.end()) {
    machine.error = "no barrier was initialised at " + std::to_string(address);
    return nullptr;
  }
  return &found->second;
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

// With what the thread knows.
void arrive_and_tell(Block& of, uint32_t address) {
  tell(known(of, address).told);
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

void settle(Meeting& meeting, int expected) {
  if (meeting.arrived != 0 && meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.passed = meeting.told;
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
    for (const uint32_t entry : machine.current->published) {
      uint32_t& known = meeting.told.plain[entry];
      known = std::max(known, 1u);
    }
  }
  const uint64_t generation = meeting.generation;
  ++meeting.arrived;
  settle(meeting, expected);
  wait_until([&meeting, generation] { return meeting.generation != generation; }, what);
  knows.join(meeting.passed);
}

void enter_fiber() {
  (*machine.kernel)();
  if (!machine.current->stores.empty() || !machine.current->storing.empty()) {
    fail("a thread leaves while the copy engine may still read its stores");
  }
  machine.current->done = true;
  settle(machine.meeting, --machine.alive);  // the cluster's barrier waits for the threads that have not left
  yield();
}

void load(int to_block, uint32_t to, const sm90::TensorMap& map, int column, int row, uint32_t barrier, int access) {
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
  if (Barrier* found = find(of, barrier)) {
    machine.accesses[access].end(found->entry, time_of_phase(*found));
    found->bytes -= map.box_bytes();
    check_phase(*found);
  }
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

std::string who_waits() {
  std::map<std::string, int> waits;
  for (const auto& fiber : machine.fibers) {
    if (!fiber->done) {
      ++waits["block " + std::to_string(fiber->block) + " warp " + std::to_string(fiber->thread / 32) + ": " +
              fiber->waits_for];
    }
  }
  std::string text = "deadlock:";
  for (const auto& [what, count] : waits) text += "\n  " + what + " (" + std::to_string(count) + " threads)";
  return text;
}

void run_cluster() {
  machine.blocks.clear();
  machine.blocks.resize(machine.cluster);
  machine.fibers.clear();
  machine.tiles.clear();
  machine.accesses.clear();
  const uint32_t threads = machine.cluster * machine.threads, entries = threads + machine.cluster * kBarriers;
  const auto reset = [entries](Meeting& meeting) {
    meeting = {};
    meeting.told.resize(entries), meeting.passed.resize(entries);
  };
  reset(machine.meeting);
  for (int b = 0; b < machine.cluster; ++b) {
    Block& of = machine.blocks[b];
    of.storage.assign(machine.shared_bytes + 1024, 0x7F);  // NaN codes
    of.memory = of.storage.data() + (1024 - reinterpret_cast<uintptr_t>(of.storage.data()) % 1024) % 1024;
    of.history.resize(machine.shared_bytes);
    reset(of.meeting);
    of.warps.resize((machine.threads + 31) / 32);
    for (Warp& warp : of.warps) reset(warp.memory), reset(warp.values);
    for (int t = 0; t < machine.threads; ++t) {
      auto fiber = std::make_unique<Fiber>();
      fiber->block = b, fiber->thread = t;
      fiber->entry = uint32_t(machine.fibers.size());
      fiber->knows.resize(entries);
      fiber->knows.plain[fiber->entry] = fiber->knows.order[fiber->entry] = 1;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStackBytes;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, enter_fiber, 0);
      machine.fibers.push_back(std::move(fiber));
    }
  }
  const int service = machine.seed % 3;  // of copies: 0 when nothing else can run, 1 evenly, 2 eagerly
  const uint32_t slow = machine.seed == 0 ? 0 : machine.random();  // warps that seldom run
  const int total = int(machine.fibers.size());
  int next = 0;
  machine.alive = total;
  while (machine.alive > 0) {
    std::vector<Fiber*> copying;
    const bool serve = service == 2 || (service == 1 && chance(4));
    Fiber* chosen = nullptr;
    if (!serve || machine.tiles.empty()) {
      if (chance(8)) next = int(machine.random() % total);
      for (int pass = 0; pass < 2 && chosen == nullptr; ++pass) {
        for (int i = 0; i < total; ++i) {
          Fiber* fiber = machine.fibers[(next + i) % total].get();
          const bool is_slow = slow >> (fiber->block * 12 + fiber->thread / 32) % 32 & 1;
          if (fiber->done || (pass == 0 && is_slow && !chance(200))) continue;
          if (fiber->ready == nullptr || fiber->ready()) {
            chosen = fiber;
            next = (next + i + 1) % total;
            break;
          }
        }
      }
    }
    if (chosen != nullptr) {
      machine.current = chosen;
      swapcontext(&machine.scheduler, &chosen->context);
      machine.current = nullptr;
    }
    if (chosen == nullptr || serve) {
      for (const auto& fiber : machine.fibers) {
        if (!fiber->copies.empty()) copying.push_back(fiber.get());
      }
      if (!machine.tiles.empty() && (copying.empty() || chance(2))) {
        const size_t pick = machine.random() % machine.tiles.size();
        const auto tile = std::move(machine.tiles[pick]);
        machine.tiles.erase(machine.tiles.begin() + pick);
        tile();
      } else if (!copying.empty()) {
        Fiber* fiber = copying[machine.random() % copying.size()];
        fiber->copies.front()();
        fiber->copies.pop_front();
      } else if (chosen == nullptr) {
        machine.error = who_waits();
      }
    }
    ++machine.steps;
    if (!machine.error.empty()) throw std::runtime_error(machine.error);
  }
  for (const Block& of : machine.blocks) {
    if (of.meeting.arrived != 0) throw std::runtime_error("a block's barrier is left with arrivals at the end");
    for (const auto& [address, barrier] : of.barriers) {
      if (barrier.bytes != 0) throw std::runtime_error("an mbarrier is left waiting for bytes at the end");
    }
  }
}

}  // namespace

namespace jetrl {

int multiprocessors() { return machine.multiprocessors; }

void run_grid(const Grid& grid, const std::function<void()>& kernel) {
  if (grid.blocks % grid.cluster != 0 || grid.shared_bytes > kSharedMemory || grid.columns > 65535) {
    throw std::runtime_error("a launch the hardware refuses");
  }
  machine.grid = grid.blocks, machine.cluster = grid.cluster, machine.threads = grid.threads;
  machine.shared_bytes = grid.shared_bytes;
  machine.kernel = &kernel;
  machine.error.clear();
  machine.random.seed(machine.seed);
  for (machine.column = 0; machine.column < grid.columns; ++machine.column) {
    for (machine.first_block = 0; machine.first_block < grid.blocks; machine.first_block += grid.cluster) {
      run_cluster();
    }
  }
}

}  // namespace jetrl

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
}
void fence_barrier_init() {
  Fiber& fiber = *machine.current;
  for (const uint32_t entry : fiber.initialised) fiber.knows.plain[entry] = 1;
  fiber.published = fiber.initialised;
}
void fence_for_copies() { machine.current->knows.copies = machine.current->knows.plain; }
void barrier_arrive(uint32_t barrier) {
  arrive_and_tell(block(), barrier);
  maybe_yield();
}
void barrier_arrive_at(uint32_t barrier, int rank) {
  for (const auto& fiber : machine.fibers) {  // warps beside the producer may leave at any time, in its warpgroup
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
  Barrier& found = known(block(), barrier);
  wait_until([&found, parity] { return (found.phase & 1) != parity; },
             std::string(name) + "[" + std::to_string(stage) + "] parity " + std::to_string(parity));
  Knowledge& knows = machine.current->knows;
  knows.join(found.passed);
  knows.plain[found.entry] = std::max(knows.plain[found.entry], 1 + found.phase);
  found.waits.push_back({machine.current->entry, knows.order[machine.current->entry]});
}

void tma_load_multicast(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier, uint16_t blocks) {
  if (map->swizzled() && to % 1024 != 0) fail("an operand tile that does not start on a swizzle atom");
  if (to % 128 != 0) fail("a box that does not start on 128 bytes");
  check_read(map->data);
  for (int b = 0; b < machine.cluster; ++b) {
    if (blocks >> b & 1) {
      known(machine.blocks[b], barrier);
      const int access = begin("the copy engine's load for a thread", true, false);
      touch(machine.blocks[b], access, to, map->box_bytes());
      machine.tiles.push_back([=, map = *map] { load(b, to, map, column, row, barrier, access); });
    }
  }
  maybe_yield();
}
void tma_load(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  tma_load_multicast(to, map, column, row, barrier, uint16_t(1u << machine.current->block));
}
void tma_store(const TensorMap* map, uint32_t from, int column, int row) {
  if (from % 1024 != 0) fail("a box that does not start on a swizzle atom");
  if (column < 0 || row < 0) fail("a box before the matrix");
  Block* of = &block();
  machine.current->storing_reads.push_back(begin("the copy engine's store for a thread", false, false));
  touch(*of, machine.current->storing_reads.back(), from, map->box_bytes());
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
  maybe_yield();
}
void tma_store_wait_read() {
  Fiber& fiber = *machine.current;
  if (chance(2)) yield();
  for (const auto& one : fiber.storing) one();
  fiber.storing.clear();
  end(fiber.storing_reads, fiber.entry, fiber.knows.plain[fiber.entry]);
}
void touch_by_cp_async(uint32_t to, uint32_t bytes) {
  machine.current->copying.push_back(begin("a cp.async", true, true));
  touch(block(), machine.current->copying.back(), to, bytes);
}
void cp_async_f32(uint32_t to, const float* from, bool valid) {
  if (to % 4 != 0) fail("a misaligned cp.async");
  if (valid) check_read(from);
  Block* of = &block();
  touch_by_cp_async(to, 4);
  machine.current->copies.push_back([=] {
    const float value = valid ? *from : 0.0f;
    std::memcpy(at(*of, to, 4), &value, 4);
  });
}
void cp_async_16(uint32_t to, const void* from, bool valid) {
  if (to % 16 != 0 || (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0)) fail("a misaligned cp.async");
  if (valid) check_read(from);
  Block* of = &block();
  touch_by_cp_async(to, 16);
  machine.current->copies.push_back([=] {
    uint8_t bytes[16] = {};
    if (valid) std::memcpy(bytes, from, 16);
    std::memcpy(at(*of, to, 16), bytes, 16);
  });
}
void cp_async_wait() {
  Fiber& fiber = *machine.current;
  wait_until([&fiber] { return fiber.copies.empty(); }, "its copies");
  end(fiber.copying, fiber.entry, fiber.knows.plain[fiber.entry]);
}
void cp_async_arrive(uint32_t barrier) {
  Block* of = &block();
  known(*of, barrier);
  Fiber& fiber = *machine.current;
  fiber.copies.push_back([=, copied = std::move(fiber.copying), order = fiber.knows.order]() mutable {
    if (Barrier* found = find(*of, barrier)) {
      end(copied, found->entry, time_of_phase(*found));
      Knowledge::join(found->told.order, order);
    }
    arrive(*of, barrier);
  });
  fiber.copying.clear();
  begin_time();
  maybe_yield();
}

void issue_wgmma(float* d, int n, uint64_t a, uint64_t b, bool keep) {
  Fiber& fiber = *machine.current;
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
  if (chance(2)) yield();
  while (int(fiber.groups.size()) > pending) {
    Chain& oldest = fiber.groups.front();
    for (const Wgmma& op : oldest.instructions) compute(fiber, op);
    machine.accesses[oldest.reads].end(fiber.entry, fiber.knows.plain[fiber.entry]);
    fiber.groups.pop_front();
  }
}

// Brings this lane's four values; returns those of all lanes.
const uint32_t (*meet(uint32_t r0, uint32_t r1 = 0, uint32_t r2 = 0, uint32_t r3 = 0))[4] {
  Warp& warp = block().warps[machine.current->thread / 32];
  auto& slots = warp.slots[warp.values.generation & 1];
  const uint32_t mine[4] = {r0, r1, r2, r3};
  std::memcpy(slots[machine.current->thread % 32], mine, sizeof(mine));
  join_and_wait(warp.values, 32, "its warp", Passes::kOrder);
  maybe_yield();
  return slots;
}

uint32_t exchange(uint32_t value, int lane) { return meet(value)[lane][0]; }

// Each lane writes the row whose address it gave, when its time comes: nobody else may count on it before a sync_warp.
void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  if (address % 16 != 0) fail("a misaligned stmatrix");
  const int lane = machine.current->thread % 32;
  const auto slots = meet(r0, r1, r2, r3);
  touch_now(*machine.current, true, address, 16);
  for (int i = 0; i < 4; ++i) std::memcpy(at(block(), address + 4 * i, 4), &slots[4 * (lane % 8) + i][lane / 8], 4);
}

}  // namespace sm90

// ---- accesses of the kernels' own C++ -------------------------------------------------------------------------------

// Kernels are compiled with -fsanitize=thread, which puts a call of these in front of each access to memory; there is
// no other runtime library of that sanitizer.
namespace {

void access(const void* pointer, bool write, int bytes) {
  if (machine.current == nullptr) return;  // the host's code
  const ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - block().memory;
  if (offset >= 0 && offset < machine.shared_bytes) {
    touch_now(*machine.current, write, uint32_t(offset) + kFirstAddress, bytes);
  }
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
}

// ---- C interface ---------------------------------------------------------------------------------------------------

// A library may hold some of the kernels only.
namespace jetrl {
__attribute__((weak)) void fprop(const Operand&, const Operand&, int, const Bias&, const Output&, Config, Stream);
__attribute__((weak)) void decode_fprop(const Operand&, const Operand&, int, const Bias&, const Output&, Config, bool,
                                        Stream);
__attribute__((weak)) void wgrad(const Operand&, const Operand&, int, const Output&, Config, Stream);
__attribute__((weak)) void relayout_128x1(const Operand&, int, bool, const Transposed&, Stream);
__attribute__((weak)) void transpose_128x128(const Operand&, int, const Transposed&, Stream);
__attribute__((weak)) void silu_mul_backward(const Bf16Rows&, const Bf16Rows&, const Bf16Rows&, int, int, bool,
                                             const QuantisedBothWays&, const QuantisedBothWays&, Stream);
}  // namespace jetrl

namespace {

// 0, or 1 with jetrl_error saying why.
template <class Call>
int guarded(uint32_t seed, const Call& call) {
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

// kernel: 0 fprop, 1 decode, 2 wgrad. Returns 0, or 1 with jetrl_error saying why.
int jetrl_run(int kernel, int m, int n, int k, const void* a, int64_t a_stride, const float* a_scales, int64_t a_row,
              int64_t a_group, const void* b, int64_t b_stride, const float* b_scales, int64_t b_row, int64_t b_group,
              const void* bias, int bias_fp32, void* out, int64_t out_stride, int out_fp32, int accumulate, int block,
              int cluster, int multiprocessors, uint32_t seed) {
  machine.multiprocessors = multiprocessors;
  const jetrl::Operand of_a{a, m, a_stride, {a_scales, a_row, a_group}};
  const jetrl::Operand of_b{b, n, b_stride, {b_scales, b_row, b_group}};
  const jetrl::Output of_out{out, out_stride, out_fp32 != 0, accumulate != 0};
  const jetrl::Bias of_bias{bias, bias_fp32 != 0};
  const jetrl::Config config{block, cluster};
  return guarded(seed, [&] {
    if (kernel == 0) {
      jetrl::fprop(of_a, of_b, k, of_bias, of_out, config, nullptr);
    } else if (kernel == 1) {
      const int64_t last_scale = (m - 1) * a_row + (jetrl::ceil_div(k, jetrl::kGroup) - 1) * a_group;
      if (m <= 64) machine.counted_rows = m;  // what follows a tile of fewer is whatever lies there
      machine.fresh = {{a, static_cast<const uint8_t*>(a) + m * a_stride}, {a_scales, a_scales + last_scale + 1}};
      jetrl::decode_fprop(of_a, of_b, k, of_bias, of_out, config, true, nullptr);
    } else {
      jetrl::wgrad(of_a, of_b, k, of_out, config, nullptr);
    }
  });
}

// rule: 0 fp32, 1 pow2: the re-layout of x [m, k]; -1: the transpose of a weight's codes and scales.
int jetrl_transpose(int rule, int m, int k, const void* codes, int64_t stride, const float* scales, int64_t scale_row,
                    int64_t scale_group, void* out, int64_t out_stride, float* out_scales, uint32_t seed) {
  const jetrl::Operand of{codes, m, stride, {scales, scale_row, scale_group}};
  const jetrl::Transposed to{out, out_stride, out_scales};
  return guarded(seed, [&] {
    if (rule < 0) {
      jetrl::transpose_128x128(of, k, to, nullptr);
    } else {
      jetrl::relayout_128x1(of, k, rule == 1, to, nullptr);
    }
  });
}

// dy, gate, up: BF16 [rows, k] and their strides in elements. results: codes and scales of the rows, of the columns, of
// gate's gradient, then of up's.
int jetrl_silu_mul_backward(int pow2, int rows, int k, const uint16_t* dy, int64_t dy_stride, const uint16_t* gate,
                            int64_t gate_stride, const uint16_t* up, int64_t up_stride, void* const* results,
                            int64_t column_stride, uint32_t seed) {
  const auto gradient = [=](void* const* of) {
    return jetrl::QuantisedBothWays{
        of[0], static_cast<float*>(of[1]), {of[2], column_stride, static_cast<float*>(of[3])}};
  };
  return guarded(seed, [&] {
    jetrl::silu_mul_backward({dy, dy_stride}, {gate, gate_stride}, {up, up_stride}, rows, k, pow2 != 0,
                             gradient(results), gradient(results + 4), nullptr);
  });
}
}

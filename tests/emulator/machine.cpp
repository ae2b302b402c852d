// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// The emulated cluster's scheduler (emulator/sm90.h says what is modelled, instructions.cpp has the instructions).
//
// A step is the next instruction of a runnable thread or a copy in flight. A seed chooses which, and how unfairly: some
// warps are slow, copies run eagerly, evenly, or only when no thread can run.

#include "machine.h"

namespace emulator {

Machine machine;

bool chance(int one_in) { return machine.random() % one_in == 0; }

Block& block() { return machine.blocks[machine.current->block]; }

void yield() { swapcontext(&machine.current->context, &machine.scheduler); }

[[noreturn]] void fail(const std::string& sentence) {
  if (machine.error.empty()) machine.error = sentence;
  for (;;) yield();
}

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

void settle(Meeting& meeting, int expected) {
  if (meeting.arrived != 0 && meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.passed = meeting.told;
  }
}

}  // namespace emulator

using namespace emulator;

namespace {

void enter_fiber() {
  (*machine.kernel)();
  if (!machine.current->stores.empty() || !machine.current->storing.empty()) {
    fail("a thread leaves while the copy engine may still read its stores");
  }
  machine.current->done = true;
  settle(machine.meeting, --machine.alive);  // the cluster's barrier waits for the threads that have not exited
  yield();
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
    of.storage.assign(machine.shared_bytes + 1024 + 2 * kNobodys, 0xFF);  // NaN in E4M3, BF16 and FP32
    of.memory = of.storage.data() + kNobodys + (1024 - reinterpret_cast<uintptr_t>(of.storage.data()) % 1024) % 1024;
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
  const int service = machine.seed % 3;  // copies run 0 when nothing else can, 1 evenly, 2 eagerly
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
  for (int b = 0; b < machine.cluster && !machine.fresh.empty(); ++b) {
    const auto waited = [b](const auto& fiber) { return fiber->block == b && fiber->waited; };
    if (std::none_of(machine.fibers.begin(), machine.fibers.end(), waited)) {
      throw std::runtime_error("a block leaves without having waited for the previous kernel");
    }
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

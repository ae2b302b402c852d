// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// State of the emulated cluster; machine.cpp runs it, instructions.cpp has its instructions.

#pragma once

#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "launch.h"
#include "races.h"

namespace emulator {

constexpr uint32_t kFirstAddress = 1024;  // of dynamic shared memory; addresses below are invalid
constexpr ptrdiff_t kNobodys = 64 * 1024;  // bytes on either side of shared memory
constexpr size_t kStackBytes = 128 * 1024;
constexpr int kBarriers = 96;  // of a block, at most

struct Barrier {
  int count, pending;
  uint32_t entry;  // of Knowledge
  int64_t bytes = 0;
  uint32_t phase = 0;  // number of completed phases
  Knowledge told, passed;  // by all arrivals, by those of completed phases
  std::vector<std::pair<uint32_t, uint32_t>> waits;  // that saw the last phase complete: a thread's entry and its time
};

struct Meeting {  // a warp's, block's or cluster's barrier
  int arrived = 0;
  uint64_t generation = 0;
  Knowledge told, passed;
};

struct Warp {
  Meeting memory;  // sync_warp
  Meeting values;  // exchanges, which order no access to memory
  // Operands of an exchange: two sets, since a fast lane may reach the next exchange while a slow one still reads this
  // one's; it cannot reach the one after that.
  uint32_t slots[2][32][4];
};

struct Wgmma {
  float* d;
  int n;
  uint64_t a, b;
  bool keep;
};

struct Chain {
  std::vector<Wgmma> instructions;
  int reads = -1;  // an access
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  int block, thread;
  bool done = false;
  bool waited = false;  // for the previous kernel
  std::function<bool()> ready;
  std::string waits_for;
  std::deque<std::function<void()>> copies;  // cp.async and its arrivals, in order
  Chain issued;                              // not yet committed
  std::deque<Chain> groups;                  // committed, not yet waited for
  std::vector<std::function<void()>> stores, storing;  // of TMA, not yet committed and not yet waited for
  Knowledge knows;
  uint32_t entry;                                // its own, of Knowledge
  int reading = -1, writing = -1;                // its accesses since it last published
  std::vector<int> copying;                      // accesses of cp.async in flight
  std::vector<int> reads_of_stores, reads_of_storing;
  bool fenced = false;                           // since it last waited for wgmma
  std::vector<uint32_t> initialised;             // entries of mbarriers, by this thread
};

struct Block {
  std::vector<uint8_t> storage;
  uint8_t* memory;
  std::map<uint32_t, Barrier> barriers;
  History history;
  Meeting meeting;
  std::vector<Warp> warps;
};

struct Machine {
  int multiprocessors = 4;
  uint32_t seed = 0;
  int grid = 0, cluster = 0, threads = 0, shared_bytes = 0, first_block = 0, column = 0;
  std::vector<Block> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::function<void()>> tiles;  // TMA loads in flight, one per destination
  Meeting meeting;  // of the cluster's threads that have not exited
  int alive = 0;
  const std::function<void()>* kernel = nullptr;
  std::vector<std::pair<const void*, const void*>> fresh;  // from, to: what the previous kernel may write
  std::vector<std::pair<const void*, const void*>> given;  // likewise: where copies may read; none: anywhere
  std::mt19937 random;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::string error;
  uint64_t steps = 0;
  std::vector<Access> accesses;  // of this cluster
  int counted_rows = 0;          // of wgmma's A; results of other rows are not stored
};

extern Machine machine;

bool chance(int one_in);
Block& block();  // of the fiber that runs

// By a fiber: lets others run; until `ready`; for good, when the machine stops.
void yield();
void maybe_yield();
void wait_until(std::function<bool()> ready, const std::string& what);
[[noreturn]] void fail(const std::string& sentence);

void settle(Meeting& meeting, int expected);  // ends it if all have arrived

}  // namespace emulator

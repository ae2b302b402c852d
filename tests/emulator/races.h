// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Races in shared memory by happens-before: two accesses to a word, one of them a write, of which neither is ordered
// before the other, in whatever order this run made them.
//
// Vector clocks (Lamport 1978, Fidge 1988; per location as in FastTrack, Flanagan and Freund 2009), with an entry for
// each thread and one for each mbarrier. A thread's entry counts how often it has published what it
// knows; an mbarrier's is 0 before its initialization is known, then 1 plus the number of phases known to be complete.
//
// Invariant: before an access begins, its thread knows that every conflicting access is complete (Access::before). A
// thread's own access is complete at once. One that the machine makes later completes with an mbarrier, in the phase
// that a copy's bytes or arrival complete, or with the thread that waits for it (reads of wgmma, a store, cp.async).
// Whoever learns of that phase, or of that thread's entry, knows that it is complete.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

// What a thread or an mbarrier knows to be complete, in three clocks. `copies`: what of `plain` a fence has passed to
// the copy engine and wgmma, which see the other proxy only across a fence. `order`: what comes earlier without an
// order of memory, also what is before a relaxed barrier, an exchange among lanes, or the arrival that follows
// cp.async. A wait names a phase of an mbarrier by its parity alone, so the next phase must not end before every such
// wait has returned. An arrival, a copy's bytes or a wait must know that the previous phase is complete: otherwise
// another run could count it in another phase.
struct Knowledge {
  std::vector<uint32_t> plain, copies, order;

  void resize(size_t entries) { plain.resize(entries), copies.resize(entries), order.resize(entries); }

  static void join(std::vector<uint32_t>& times, const std::vector<uint32_t>& others) {
    for (size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], others[i]);
  }
  void join(const Knowledge& other) {
    join(plain, other.plain), join(copies, other.copies), join(order, other.order);
  }
};

struct Access {
  const char* what;
  int block, thread;  // that made or requested it
  bool write;
  bool by_thread;  // through the generic proxy
  uint32_t entry = 0, time = UINT32_MAX;  // complete for whoever knows this entry at this time or later

  void end(uint32_t at_entry, uint32_t at_time) { entry = at_entry, time = at_time; }

  // Whether the thread that begins `later`, with knowledge `knows`, knows that this access is complete.
  bool before(const Access& later, const Knowledge& knows) const {
    const bool needs_fence = write && by_thread && !later.by_thread;
    return (needs_fence ? knows.copies : knows.plain)[entry] >= time;
  }
};

// History of a block's shared memory: per place the last write, and the reads since. Accesses of whole swizzle atoms of
// 1024 bytes are kept per atom, others per word of 4 bytes: writes of different threads to bytes of a word are a race.
class History {
 public:
  void resize(int bytes) { atoms_.resize((bytes + kAtom - 1) / kAtom); }

  // Adds `id`, of `accesses`, to the history of some bytes; returns an earlier access that it races with, or -1.
  int touch(const std::vector<Access>& accesses, int id, uint32_t at, uint32_t bytes, const Knowledge& knows) {
    int met = -1;
    const auto visit = [&](Place& place, bool add) {
      const Access& later = accesses[id];
      const auto look = [&](int earlier) {
        if (earlier != -1 && !accesses[earlier].before(later, knows)) met = earlier;
      };
      look(place.write);
      if (later.write) {
        for (const int read : place.reads) look(read);
      }
      if (!add) return;
      if (later.write) {
        place.write = id;
        place.reads.clear();
      } else if (place.reads.empty() || place.reads.back() != id) {
        place.reads.push_back(id);
      }
    };
    const uint32_t end = at + bytes;
    while (at < end && at / kAtom < atoms_.size()) {
      Atom& atom = atoms_[at / kAtom];
      const uint32_t stop = std::min(end, (at / kAtom + 1) * kAtom);
      if (stop - at == kAtom) {
        if (atom.words != nullptr) {
          for (Place& place : *atom.words) visit(place, false);
          if (accesses[id].write) atom.words = nullptr;
        }
        visit(atom.whole, true);
      } else {
        if (atom.words == nullptr) atom.words = std::make_unique<std::array<Place, kAtom / kWord>>();
        visit(atom.whole, false);
        for (uint32_t word = at / kWord; word <= (stop - 1) / kWord; ++word) {
          visit((*atom.words)[word % (kAtom / kWord)], true);
        }
      }
      at = stop;
    }
    return met;
  }

 private:
  static constexpr uint32_t kAtom = 1024, kWord = 4;

  struct Place {
    int write = -1;
    std::vector<int> reads;
  };
  struct Atom {
    Place whole;
    std::unique_ptr<std::array<Place, kAtom / kWord>> words;  // where smaller accesses were
  };

  std::vector<Atom> atoms_;
};

}  // namespace emulator

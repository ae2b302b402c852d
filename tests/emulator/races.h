// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Races in shared memory, found by what happens before what and not by what a run happens to read: two accesses to a
// word, one of them a write, of which neither is ordered before the other, in whatever order this run made them.
//
// Vector clocks (Lamport 1978, Fidge 1988; per location as in FastTrack, Flanagan and Freund 2009), with an entry for
// each thread and one for each mbarrier. A thread's entry counts the times that it told others what it knows; an
// mbarrier's is 0 before its initialisation is known, and then 1 and the number of phases known to be over.
//
// Invariant: before an access begins, its thread knows that whatever it conflicts with is over (Access::before). A
// thread's own access is over at once. One that the machine makes later, a copy's write or wgmma's reads, is over
// nowhere until its end has a place: a copy's with an mbarrier in the phase that its bytes or its arrival complete,
// wgmma's, a store's reads and those of cp.async with the thread that waits for them. Who learns of that phase, or of
// that thread's entry, knows that it is over.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

// What a thread or an mbarrier knows to be over, three times. `copies`: the copy engine and wgmma see what threads
// wrote through the other proxy only across a fence; what of `plain` a fence has passed on to them. `order`: what has to
// come earlier without a word about memory, also what stands before a relaxed barrier, an exchange among lanes, or the
// arrival that follows cp.async: a wait names a phase of an mbarrier by its parity alone, so the next phase must not
// end before every such wait has returned. Nor may an arrival, a copy's bytes or a wait come by who does not know that
// the phase before is over: this run would count it in one phase and another run in the other, and what is ordered here
// might not be there.
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
  int block, thread;  // that made it or asked for it
  bool write;
  bool by_thread;  // through the generic proxy
  uint32_t entry = 0, time = UINT32_MAX;  // known to be over by who knows this entry to be at this time or later

  void end(uint32_t at_entry, uint32_t at_time) { entry = at_entry, time = at_time; }

  // Whether who begins `later`, and knows `knows`, knows that this one is over.
  bool before(const Access& later, const Knowledge& knows) const {
    const bool needs_fence = write && by_thread && !later.by_thread;
    return (needs_fence ? knows.copies : knows.plain)[entry] >= time;
  }
};

// What happened to a block's shared memory: per place the last write, and the reads since. What is read or written as
// whole swizzle atoms of 1024 bytes is kept by those, anything else by words of 4: bytes of a word written by different
// threads would be called a race.
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

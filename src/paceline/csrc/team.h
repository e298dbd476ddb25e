// The threads that carry out an operation together, as one of them sees it.
//
// An operation is a function that every thread of a team calls with the same arguments. It takes its share of the
// outputs by the thread's number; it waits for the others only where it reads what they wrote, and not at its end.
// Memory that it needs in passing is handed in, for nothing is allocated while threads run: where there is any,
// `..._scratch` says how many bytes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "kernels/kernels.h"
#include "thread_pool.h"

namespace paceline {

struct Team {
  ThreadPool* pool;  // null for a thread on its own
  const Kernels& kernels;
  int thread, size;

  // This thread's part of `count` items.
  Share share(int64_t count) const { return share_of(count, size, thread); }

  // Waits until all threads of the team have come here.
  void barrier() const {
    if (size > 1) pool->barrier(thread);
  }
};

// The threads, the instruction set and the memory of an engine. One caller at a time.
class Machine {
 public:
  Machine(int num_threads, const Kernels& kernels) : pool(num_threads), kernels(kernels) {}

  // Less work than this, in elements of a row operation, is not worth waking anybody for.
  static constexpr int64_t kWorthSharing = 16384;

  // operation(team, scratch) on every thread, or on the caller alone if there is little work.
  template <class F>
  void run(int64_t work, int64_t scratch_bytes, const F& operation) {
    uint8_t* scratch = scratch_.reserve(scratch_bytes);
    if (work < kWorthSharing) {
      operation(Team{nullptr, kernels, 0, 1}, scratch);
      return;
    }
    pool.run([&](int thread) { operation(Team{&pool, kernels, thread, pool.size()}, scratch); });
  }

  ThreadPool pool;
  const Kernels& kernels;
  Arena weights;

 private:
  Buffer scratch_;
};

}  // namespace paceline

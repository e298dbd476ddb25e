#include "thread_pool.h"

#include <algorithm>
#include <chrono>

namespace paceline {
namespace {

// Between two tasks of one step pass a few microseconds: worth waiting awake for. Longer gaps are idle time.
constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kPausesBetweenLooks = 64;

// Threads meet along a tree: each waits for this many others, then tells the one that waits for it. So nobody looks at
// all the others' cache lines, and none is written by more than one thread.
constexpr int kTreeWidth = 4;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The others are at work, so the wait is never long; but where threads outnumber the cores, the one waited for may need
// this core.
int spins_before_yield(int num_threads) {
  return num_threads > static_cast<int>(std::thread::hardware_concurrency()) ? 10 : 2000;
}

}  // namespace

template <class Ready>
void ThreadPool::spin_until(Ready ready) const {
  for (int i = 0; !ready(); ++i) {
    if (i < spins_) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

ThreadPool::ThreadPool(int num_threads)
    : size_(num_threads), spins_(spins_before_yield(num_threads)), arrived_(num_threads) {
  for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(sleep_);
    stop_ = true;
    round_.value.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::start(Task task, const void* context) {
  if (size_ == 1) {
    task(context, 0);
    return;
  }
  std::lock_guard turn(turn_);
  task_ = task;
  context_ = context;
  // Sequentially consistent, as is the sleepers' side: either the sleeper sees the new round or we see the sleeper.
  round_.value.store(round_.value.load(std::memory_order_relaxed) + 1);
  if (sleepers_.load() > 0) {
    {
      std::lock_guard lock(sleep_);
    }
    wake_.notify_all();
  }
  task(context, 0);
  barrier(0);
}

uint64_t ThreadPool::wait_for_round(uint64_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesBetweenLooks; ++i) {
      const uint64_t now = round_.value.load(std::memory_order_acquire);
      if (now != seen) return now;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock lock(sleep_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return round_.value.load() != seen; });
  sleepers_.fetch_sub(1);
  return round_.value.load();
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    seen = wait_for_round(seen);
    if (stop_) return;
    task_(context_, thread);
    arrive(thread);  // the caller waits for all; nobody waits for the caller
  }
}

uint64_t ThreadPool::arrive(int thread) {
  const uint64_t meeting = arrived_[thread].value.load(std::memory_order_relaxed) + 1;
  const int first = thread * kTreeWidth + 1, last = std::min(first + kTreeWidth, size_);
  for (int other = first; other < last; ++other) {
    spin_until([&] { return arrived_[other].value.load(std::memory_order_acquire) == meeting; });
  }
  arrived_[thread].value.store(meeting, std::memory_order_release);
  return meeting;
}

void ThreadPool::barrier(int thread) {
  if (size_ == 1) return;
  const uint64_t meeting = arrive(thread);
  if (thread == 0) {
    met_.value.store(meeting, std::memory_order_release);
  } else {
    spin_until([&] { return met_.value.load(std::memory_order_acquire) >= meeting; });
  }
}

}  // namespace paceline

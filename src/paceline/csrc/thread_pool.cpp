#include "thread_pool.h"

#include <chrono>

namespace paceline {
namespace {

// Between two operations of one step pass a few microseconds: worth waiting awake for. Longer gaps are idle time.
constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kPausesBetweenLooks = 64;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for the others of a running round. They are at work, so it is never long; but where threads outnumber the free
// cores the one waited for may need this core.
template <class Ready>
void spin_until(Ready ready) {
  for (int i = 0; !ready(); ++i) {
    if (i < 2000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : size_(num_threads), done_(num_threads) {
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
  const uint64_t round = round_.value.load(std::memory_order_relaxed) + 1;
  // Sequentially consistent, as is the sleepers' side: either the sleeper sees the new round or we see the sleeper.
  round_.value.store(round);
  if (sleepers_.load() > 0) {
    {
      std::lock_guard lock(sleep_);
    }
    wake_.notify_all();
  }
  task(context, 0);
  for (int i = 1; i < size_; ++i) {
    spin_until([&] { return done_[i].value.load(std::memory_order_acquire) == round; });
  }
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
    done_[thread].value.store(seen, std::memory_order_release);
  }
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint64_t phase = phase_.value.load(std::memory_order_acquire);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint64_t>(size_)) {
    arrived_.value.store(0, std::memory_order_relaxed);
    phase_.value.store(phase + 1, std::memory_order_release);
    return;
  }
  spin_until([&] { return phase_.value.load(std::memory_order_acquire) != phase; });
}

}  // namespace paceline

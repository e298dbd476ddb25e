// A fixed set of threads that run one function together. Work is divided by the callers, statically; nothing is queued.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

struct Share {
  int64_t first, last;
};
// Part `index` of `count` items cut into `parts`, sizes differing by at most one; the first part is never the smaller.
inline Share share_of(int64_t count, int parts, int index) {
  return {(count * index + parts - 1) / parts, (count * (index + 1) + parts - 1) / parts};
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs f(thread) for thread = 0 .. size - 1, the caller being thread 0, and returns when all have returned. Calls
  // from several threads of the process take turns. f must not throw.
  template <class F>
  void run(const F& f) {
    start([](const void* context, int thread) { (*static_cast<const F*>(context))(thread); }, &f);
  }

  // Inside run: waits until all threads have come here. What they wrote before is seen after.
  void barrier(int thread);

 private:
  using Task = void (*)(const void*, int);
  // Written by one thread and alone on its cache line.
  struct alignas(64) Counter {
    std::atomic<uint64_t> value{0};
  };

  void start(Task task, const void* context);
  void work(int thread);
  uint64_t wait_for_round(uint64_t seen);
  uint64_t arrive(int thread);
  template <class Ready>
  void spin_until(Ready ready) const;

  const int size_;
  const int spins_;  // looks before a waiting thread offers its core to others
  std::vector<std::thread> threads_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  Counter round_;                 // tasks that were started
  std::vector<Counter> arrived_;  // meetings that each thread, and those below it in the tree, have come to
  Counter met_;                   // meetings to which all have come
  std::mutex turn_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  bool stop_ = false;
};

}  // namespace paceline

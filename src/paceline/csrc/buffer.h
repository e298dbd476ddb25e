// Memory for weights, keys and values, and what operations need in passing.
#pragma once
#include <cstdint>
#include <memory>

namespace paceline {

constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector

inline int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Uninitialised memory at an aligned address.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }

  // At least this large; what was in it is lost.
  uint8_t* reserve(int64_t bytes) {
    if (size_ < bytes) *this = Buffer(bytes);
    return data();
  }

 private:
  friend class Arena;
  std::shared_ptr<uint8_t> data_;
  int64_t size_ = 0;
};

// Hands out memory that is going to be kept and read over and over: from chunks of huge pages, so that reading it does
// not wait for page tables. A chunk is freed with the last buffer in it; what is never written takes no memory.
class Arena {
 public:
  Buffer take(int64_t bytes);

 private:
  std::shared_ptr<uint8_t> chunk_;
  int64_t used_ = 0, size_ = 0;
};

}  // namespace paceline

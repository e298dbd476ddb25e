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
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t size_ = 0;
};

}  // namespace paceline

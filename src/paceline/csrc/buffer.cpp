#include "buffer.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paceline {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21, kChunk = int64_t{1} << 26;

std::shared_ptr<uint8_t> allocate(int64_t alignment, int64_t bytes) {
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(bytes)));
  if (!memory) throw std::bad_alloc();
  return {memory, std::free};
}

}  // namespace

Buffer::Buffer(int64_t bytes) : data_(allocate(kAlignment, std::max(align(bytes), kAlignment))), size_(bytes) {}

Buffer Arena::take(int64_t bytes) {
  if (used_ + bytes > size_) {
    size_ = std::max(kChunk, (bytes + kHugePage - 1) / kHugePage * kHugePage);
    chunk_ = allocate(kHugePage, size_);
    used_ = 0;
#if defined(__linux__)
    madvise(chunk_.get(), static_cast<size_t>(size_), MADV_HUGEPAGE);
#endif
  }
  Buffer buffer;
  buffer.data_ = {chunk_, chunk_.get() + used_};
  buffer.size_ = bytes;
  used_ += align(bytes);
  return buffer;
}

}  // namespace paceline

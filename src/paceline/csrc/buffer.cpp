#include "buffer.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace paceline {

Buffer::Buffer(int64_t bytes) : size_(bytes) {
  data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, std::max<size_t>(align(bytes), kAlignment))));
  if (!data_) throw std::bad_alloc();
}

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

}  // namespace paceline

#include "checks.h"

#include <algorithm>
#include <stdexcept>

namespace paceline {

void refuse(const std::string& message) { throw std::invalid_argument(message); }

void require_range(const char* name, const int32_t* numbers, int64_t count, int64_t limit) {
  // Unsigned, a negative number is a large one; the loop has no branch.
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(numbers[i]));
  if (count > 0 && largest >= limit) {
    refuse(std::string(name) + " " + std::to_string(static_cast<int32_t>(largest)) + " is outside 0 .. " +
           std::to_string(limit - 1));
  }
}

}  // namespace paceline

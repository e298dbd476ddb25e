// What callers from outside may have got wrong.
#pragma once
#include <cstdint>
#include <string>

namespace paceline {

// These throw std::invalid_argument with the message. Where a check is made for every call, its message is put together
// only once it is needed.
[[noreturn]] void refuse(const std::string& message);
inline void require(bool condition, const char* message) {
  if (!condition) refuse(message);
}
inline void require(bool condition, const std::string& message) {
  if (!condition) refuse(message);
}

// Numbers from 0 to below the limit; `name` says what one of them is.
void require_range(const char* name, const int32_t* numbers, int64_t count, int64_t limit);

}  // namespace paceline

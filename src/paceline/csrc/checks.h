// What callers from outside may have got wrong.
#pragma once
#include <cstdint>
#include <string>

namespace paceline {

// Throws std::invalid_argument with the message.
void require(bool condition, const std::string& message);

// Numbers from 0 to below the limit; `name` says what one of them is.
void require_range(const char* name, const int32_t* numbers, int64_t count, int64_t limit);

}  // namespace paceline

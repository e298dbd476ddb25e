// The tables that were compiled in, and the one that this machine should use.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace paceline {

// Levels that this machine can run, the fastest first.
std::vector<const Kernels*> runnable_levels();

// By name, or the fastest for an empty name. Throws std::invalid_argument for one that is unknown here.
const Kernels& find_level(const std::string& name);

}  // namespace paceline

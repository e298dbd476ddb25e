#include "levels.h"

#include <stdexcept>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {

namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx_vnni {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512_vnni {
extern const Kernels table;
}
namespace avx512_amx {
extern const Kernels table;
}
namespace avx512_bf16 {
extern const Kernels table;
}

namespace {
// Tiles enlarge a thread's state, so a process has to ask Linux for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
}  // namespace
#endif

std::vector<const Kernels*> runnable_levels() {
  std::vector<const Kernels*> levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      if (__builtin_cpu_supports("avx512vnni")) {
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-int8") &&
            __builtin_cpu_supports("amx-bf16") && may_use_tiles()) {
          levels.push_back(&avx512_amx::table);
        }
        levels.push_back(&avx512_vnni::table);
        if (__builtin_cpu_supports("avx512bf16")) {
          // Measured: Zen 4 multiplies twice as many bfloat16 numbers as floats, an Intel Xeon half as many.
          levels.insert(__builtin_cpu_is("amd") ? levels.begin() : levels.end(), &avx512_bf16::table);
        }
      }
      levels.push_back(&avx512::table);
    }
    if (__builtin_cpu_supports("avxvnni")) levels.push_back(&avx_vnni::table);
    levels.push_back(&avx2::table);
  }
#endif
  levels.push_back(&portable::table);
  return levels;
}

const Kernels& find_level(const std::string& name) {
  const std::vector<const Kernels*> levels = runnable_levels();
  if (name.empty()) return *levels.front();
  std::string known;
  for (const Kernels* level : levels) {
    if (name == level->name) return *level;
    known += std::string(known.empty() ? "" : ", ") + level->name;
  }
  throw std::invalid_argument("isa must be one that this machine runs (" + known + "), not " + name);
}

}  // namespace paceline

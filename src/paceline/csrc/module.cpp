// The native module: what the kernels are reached through.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace {

// The widest instruction set that this machine can run, of those the kernels know.
std::string detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512vnni") ? "avx512-vnni" : "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "portable";
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Paceline's native kernels.";
  m.def("detect_isa", &detect_isa, "Name of the widest instruction set of this machine that the kernels know.");
}

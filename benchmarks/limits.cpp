// The machine's limits: what loops reach that do nothing else. limits.py compiles and runs this.
//
//     limits THREADS
//
// prints one JSON object: "read", bytes a second by the size of the buffer in bytes, and multiply-adds a second of the
// instructions that this processor has. Every figure is the best of several runs.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef long long Integers __attribute__((vector_size(kVectorBytes)));

// Products of unsigned and signed bytes, added up: the fastest way that the processor has, if it has one of its own.
// The sums have the very type that the instruction adds in, or the compiler would keep them in memory.
#if defined(__AVX512VNNI__)
typedef int Sums __attribute__((vector_size(64)));
typedef __m512i Bytes;
#define INT8_DOT [](Sums sum, Bytes b, Bytes c) { return (Sums)_mm512_dpbusd_epi32((Bytes)sum, b, c); }
#elif defined(__AVX512BW__)
typedef short Sums __attribute__((vector_size(64)));
typedef __m512i Bytes;
#define INT8_DOT [](Sums sum, Bytes b, Bytes c) { return sum + (Sums)_mm512_maddubs_epi16(b, c); }
#elif defined(__AVXVNNI__)
typedef int Sums __attribute__((vector_size(32)));
typedef __m256i Bytes;
#define INT8_DOT [](Sums sum, Bytes b, Bytes c) { return (Sums)_mm256_dpbusd_avx_epi32((Bytes)sum, b, c); }
#elif defined(__AVX2__)
typedef short Sums __attribute__((vector_size(32)));
typedef __m256i Bytes;
#define INT8_DOT [](Sums sum, Bytes b, Bytes c) { return sum + (Sums)_mm256_maddubs_epi16(b, c); }
#endif
#if defined(__AVX512BF16__)
#define BF16_DOT [](__m512 sum, __m512bh b, __m512bh c) { return _mm512_dpbf16_ps(sum, b, c); }
#endif

constexpr int kRuns = 7;
constexpr int kChains = 12;  // hides the latency of any of these instructions, and leaves registers for the operands
constexpr int64_t kRounds = 4'000'000;

int threads = 1;

// Seconds of the fastest run of `work(thread)` on all threads at once.
template <class Work>
double seconds(const Work& work) {
  double best = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> team;
    for (int i = 1; i < threads; ++i) team.emplace_back(work, i);
    work(0);
    for (std::thread& thread : team) thread.join();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

// The value cannot be known to the compiler, so that it neither drops nor moves what is computed from it.
template <class T>
void hide(T& value) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#else
  asm volatile("" : : "r"(&value) : "memory");
#endif
}

// Each thread reads its share as several streams side by side, which keeps more of the memory busy than one does.
double read_speed(size_t bytes) {
  constexpr size_t kStreams = 4, kAtOnce = 2, kHugePage = size_t{2} << 20;
  const size_t stream = bytes / sizeof(Integers) / threads / kStreams;
  Integers* const data = static_cast<Integers*>(std::aligned_alloc(kHugePage, std::max(bytes, kHugePage)));
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  std::memset(data, 1, bytes);
  const size_t passes = (size_t{512} << 20) / bytes + 1;
  const double took = seconds([&](int thread) {
    const Integers* const share = data + stream * kStreams * thread;
    Integers sums[kStreams * kAtOnce] = {};
    for (size_t pass = 0; pass < passes; ++pass) {
      for (size_t i = 0; i + kAtOnce <= stream; i += kAtOnce) {
#pragma GCC unroll 8
        for (size_t j = 0; j < kStreams * kAtOnce; ++j) sums[j] ^= share[stream * (j / kAtOnce) + i + j % kAtOnce];
      }
#pragma GCC unroll 8
      for (size_t j = 0; j < kStreams * kAtOnce; ++j) hide(sums[j]);
    }
  });
  std::free(data);
  return static_cast<double>(bytes) * passes / took;
}

// Multiply-adds a second of `step(sum, b, c)`, which does so many of them at a time.
template <class Vector, class Operand, class Step>
double arithmetic_speed(int at_a_time, Vector zero, Operand one, Operand other, const Step& step) {
  const double took = seconds([&](int) {
    Vector sums[kChains];
    for (Vector& sum : sums) sum = zero;
    Operand b = one, c = other;
    for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        hide(b);
        sums[i] = step(sums[i], b, c);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) hide(sums[i]);
  });
  return static_cast<double>(at_a_time) * kChains * kRounds * threads / took;
}

#ifdef TILES
// Four products of whole tiles, 16 rows and 16 outputs and 64 bytes of inputs, by turns.
template <class Step>
double tile_speed(int at_a_time, const Step& step) {
  constexpr int kTiles = 4;
  constexpr int64_t kTileRounds = kRounds / 4;
  const double took = seconds([&](int) {
    struct alignas(64) {
      uint8_t palette = 1, rest[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
    for (int64_t round = 0; round < kTileRounds; ++round) step();
    asm volatile("tilerelease");
  });
  return static_cast<double>(at_a_time) * kTiles * kTileRounds * threads / took;
}
#endif

}  // namespace

int main(int count, char** arguments) {
  if (count == 2) threads = std::atoi(arguments[1]);
  if (threads < 1) return 1;
  std::printf("{\"read\": {");
  for (const int mib : {1, 4, 16, 32, 128, 256}) {
    const size_t bytes = static_cast<size_t>(mib) << 20;
    std::printf("%s\"%zu\": %.4g", mib > 1 ? ", " : "", bytes, read_speed(bytes));
  }
  const Floats half = Floats{} + 0.5f;
  std::printf("}, \"fma\": %.4g", arithmetic_speed(kVectorBytes / 4, Floats{}, half, half,
                                                   [](Floats sum, Floats b, Floats c) { return sum + b * c; }));
#ifdef INT8_DOT
  const Bytes bytes = Bytes{} + 0x0303030303030303;
  std::printf(", \"int8\": %.4g", arithmetic_speed(kVectorBytes, Sums{}, bytes, bytes, INT8_DOT));
#endif
#ifdef BF16_DOT
  const __m512bh pairs = _mm512_cvtne2ps_pbh(half, half);
  std::printf(", \"bf16\": %.4g", arithmetic_speed(kVectorBytes / 2, Floats{}, pairs, pairs, BF16_DOT));
#endif
#ifdef TILES
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) {
    std::printf(", \"int8_tiles\": %.4g", tile_speed(16 * 16 * 64, [] {
                  asm volatile(
                      "tdpbssd %tmm1, %tmm0, %tmm4\n tdpbssd %tmm1, %tmm0, %tmm5\n"
                      "tdpbssd %tmm1, %tmm0, %tmm6\n tdpbssd %tmm1, %tmm0, %tmm7");
                }));
    std::printf(", \"bf16_tiles\": %.4g", tile_speed(16 * 16 * 32, [] {
                  asm volatile(
                      "tdpbf16ps %tmm1, %tmm0, %tmm4\n tdpbf16ps %tmm1, %tmm0, %tmm5\n"
                      "tdpbf16ps %tmm1, %tmm0, %tmm6\n tdpbf16ps %tmm1, %tmm0, %tmm7");
                }));
  }
#endif
  std::printf("}\n");
}

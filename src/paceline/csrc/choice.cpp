#include "choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// The best of the tokens seen so far by score + noise; the smaller id among equals.
class Draw {
 public:
  Draw(uint64_t seed, int32_t position)
      : row_(mix(mix(seed + kGolden) + (static_cast<uint64_t>(position) + 1) * kGolden)) {}

  void add(int32_t id, float z) {
    const uint64_t bits = mix(row_ + (static_cast<uint64_t>(id) + 1) * kGolden);
    const double u = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    const double score = z - std::log(-std::log(u));
    if (score > score_ || (score == score_ && id < id_)) {
      score_ = score;
      id_ = id;
    }
  }
  uint64_t row() const { return row_; }
  int32_t id() const { return id_; }
  // A token beats the best only if -ln(u) < e^z * e^-best; and 1 - u < -ln(u). The margin covers rounding to float.
  float factor() const { return static_cast<float>(std::min(std::exp(-score_) * 1.001, 1e30)); }

 private:
  uint64_t row_;
  double score_ = -std::numeric_limits<double>::infinity();
  int32_t id_ = -1;
};

// Numbers of one row: three lines in the scratch of one thread.
struct Workspace {
  float *z, *mass;
  int32_t* ids;

  static int64_t line(int width) { return align(width * static_cast<int64_t>(sizeof(float))); }
  Workspace(uint8_t* scratch, int thread, int width) {
    uint8_t* mine = scratch + 3 * line(width) * thread;
    z = reinterpret_cast<float*>(mine);
    mass = reinterpret_cast<float*>(mine + line(width));
    ids = reinterpret_cast<int32_t*>(mine + 2 * line(width));
  }
};

// Puts the ids of the k largest numbers, at least, at the front of `ids`, in no order; returns how many. x's largest is
// `peak`.
int gather_largest(const Kernels& kernels, const float* x, int width, float peak, int k, int32_t* ids) {
  for (float depth = 4.0f; depth <= 64.0f; depth *= 2.0f) {
    const int found = kernels.collect_at_least(x, width, peak - depth, ids);
    if (found >= k) return found;
  }
  return kernels.collect_at_least(x, width, -kInfinity, ids);
}

// The k largest (all, if there are fewer), descending, equal ones by smaller id.
int largest(const Kernels& kernels, const float* x, int width, float peak, int k, int32_t* ids) {
  const int found = gather_largest(kernels, x, width, peak, k, ids);
  const int kept = std::min(found, k);
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  std::partial_sort(ids, ids + kept, ids + found, before);
  return kept;
}

// Of all tokens in descending order, those with at most `limit` mass before them. Only those are sorted that lie above
// a depth where the mass, by a rough count, exceeds the limit; all, if the count was too rough.
int nucleus(const Kernels& kernels, const Workspace& work, int width, double limit) {
  const float* z = work.z;
  const float* mass = work.mass;
  int32_t* ids = work.ids;
  constexpr int kDepths = 256;  // quarters
  double by_depth[kDepths] = {};
  for (int i = 0; i < width; ++i) {
    if (mass[i] > 0.0f) by_depth[std::min(kDepths - 1, static_cast<int>(-4.0f * z[i]))] += static_cast<double>(mass[i]);
  }
  int quarters = 0;
  for (double above = 0.0; quarters < kDepths && above <= limit; ++quarters) above += by_depth[quarters];
  const auto before = [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); };
  for (float depth = 0.25f * static_cast<float>(quarters);; depth = kInfinity) {
    const int found = kernels.collect_at_least(z, width, -depth, ids);
    std::sort(ids, ids + found, before);
    double above = 0.0;
    for (int i = 0; i < found; ++i) {
      if (above > limit) return i;
      above += static_cast<double>(mass[ids[i]]);
    }
    if (found == width) return found;
  }
}

int32_t choose_row(const Kernels& kernels, const float* x, int width, float temperature, int top_k, float top_p,
                   float min_p, uint64_t seed, int32_t position, const Workspace& work) {
  const RowPeak peak = kernels.find_peak(x, width);
  if (peak.has_nan || !std::isfinite(peak.value)) return -1;
  if (temperature == 0.0f) return peak.index;
  kernels.scale_row(x, width, peak.value, temperature, work.z, work.mass);
  const float* z = work.z;
  const float* mass = work.mass;
  int32_t* ids = work.ids;
  const float lowest = min_p > 0.0f ? static_cast<float>(std::log(static_cast<double>(min_p))) : -kInfinity;
  Draw draw(seed, position);

  // min-p, top-k and top-p each keep a beginning of the tokens in descending order.
  int kept = -1;
  if (top_k > 0 && top_k < width) {
    kept = largest(kernels, z, width, 0.0f, top_k, ids);
    while (z[ids[kept - 1]] < lowest) --kept;
    if (top_p < 1.0f) {
      double total = 0.0, before = 0.0;
      for (int i = 0; i < kept; ++i) total += static_cast<double>(mass[ids[i]]);
      int i = 0;
      for (; i < kept && before <= static_cast<double>(top_p) * total; ++i) before += static_cast<double>(mass[ids[i]]);
      kept = i;
    }
  } else if (top_p < 1.0f) {
    double total = 0.0;
    if (top_k > 0 && min_p > 0.0f) {  // top-k keeps all, and the mass is relative to what min-p left to it
      for (int i = 0; i < width; ++i) total += z[i] >= lowest ? static_cast<double>(mass[i]) : 0.0;
    } else {
      total = kernels.sum_row(mass, width);
    }
    kept = nucleus(kernels, work, width, static_cast<double>(top_p) * total);
    while (z[ids[kept - 1]] < lowest) --kept;
  } else if (min_p > 0.0f) {
    kept = kernels.collect_at_least(z, width, lowest, ids);
  }
  if (kept >= 0) {
    for (int i = 0; i < kept; ++i) draw.add(ids[i], z[ids[i]]);
    return draw.id();
  }
  draw.add(peak.index, z[peak.index]);
  for (int first = 0; first < width; first += kNoiseTile) {
    const int count = std::min(kNoiseTile, width - first);
    const int found = kernels.collect_contenders(mass, first, count, draw.row(), draw.factor(), ids);
    for (int i = 0; i < found; ++i) draw.add(ids[i], z[ids[i]]);
  }
  return draw.id();
}

void edit_row(float* row, int64_t r, int width, const EditLists& edits) {
  for (int i = edits.vocab_size; i < width; ++i) row[i] = -kInfinity;
  for (int a = 0; a < edits.num_allowed; ++a) {
    if (edits.allowed_rows[a] != r) continue;
    const uint32_t* bits = edits.allowed_bits + a * edits.allowed_words;
    for (int i = 0; i < width; ++i) {
      if (!(bits[i / 32] >> (i % 32) & 1u)) row[i] = -kInfinity;
    }
  }
  for (int i = edits.bias_starts[r]; i < edits.bias_starts[r + 1]; ++i) row[edits.bias_ids[i]] += edits.bias_values[i];
  for (int i = edits.seen_starts[r]; i < edits.seen_starts[r + 1]; ++i) {
    float& z = row[edits.seen_ids[i]];
    z = z < 0.0f ? z * edits.repetition[r] : z / edits.repetition[r];
    if (edits.seen_counts[i] > 0) {
      z = z - static_cast<float>(edits.seen_counts[i]) * edits.frequency[r] - edits.presence[r];
    }
  }
  for (int i = edits.banned_starts[r]; i < edits.banned_starts[r + 1]; ++i) row[edits.banned_ids[i]] = -kInfinity;
}

// Rows are far apart in cost and each is long: one at a time is a fair share.
template <class F>
void over_logits(const Team& team, int64_t rows, F f) {
  const Share mine = team.share(rows);
  for (int64_t r = mine.first; r < mine.last; ++r) f(r);
}

}  // namespace

int64_t choice_scratch(int width, int threads) { return 3 * Workspace::line(width) * threads; }

void edit_logits(const Team& team, float* logits, int64_t rows, int width, const EditLists& edits) {
  over_logits(team, rows, [&](int64_t r) { edit_row(logits + r * width, r, width, edits); });
}

void choose(const Team& team, const float* logits, int64_t rows, int width, const ChoiceRules& rules, int32_t* chosen,
            uint8_t* scratch) {
  const Workspace work(scratch, team.thread, width);
  over_logits(team, rows, [&](int64_t r) {
    chosen[r] = choose_row(team.kernels, logits + r * width, width, rules.temperature[r], rules.top_k[r],
                           rules.top_p[r], rules.min_p[r], rules.seeds[r], rules.positions[r], work);
  });
}

void top_logprobs(const Team& team, const float* logits, int64_t rows, int width, const int32_t* chosen, int k,
                  float* chosen_values, int32_t* ranks, int32_t* top_ids, float* top_values, uint8_t* scratch) {
  const Kernels& kernels = team.kernels;
  const Workspace work(scratch, team.thread, width);
  over_logits(team, rows, [&](int64_t r) {
    const float* x = logits + r * width;
    const RowPeak peak = kernels.find_peak(x, width);
    if (peak.has_nan || !std::isfinite(peak.value)) {
      chosen_values[r] = std::numeric_limits<float>::quiet_NaN();
      ranks[r] = 0;
      std::fill(top_ids + r * k, top_ids + (r + 1) * k, 0);
      std::fill(top_values + r * k, top_values + (r + 1) * k, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    kernels.scale_row(x, width, peak.value, 1.0f, work.z, work.mass);
    const double log_sum = std::log(kernels.sum_row(work.mass, width));
    const auto logprob = [&](int32_t id) { return static_cast<float>(static_cast<double>(work.z[id]) - log_sum); };
    chosen_values[r] = logprob(chosen[r]);
    ranks[r] = kernels.count_at_least(x, width, x[chosen[r]]);
    largest(kernels, x, width, peak.value, k, work.ids);
    for (int i = 0; i < k; ++i) {
      top_ids[r * k + i] = work.ids[i];
      top_values[r * k + i] = logprob(top_ids[r * k + i]);
    }
  });
}

}  // namespace paceline

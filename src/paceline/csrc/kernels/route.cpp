// The choice of each token's experts.
//
// Scores: softmax as e^(logit - largest) over the sum (lane i adds experts i, i + 16, ...; the lanes meet in the fixed
// tree), or 1 / (1 + e^-logit). Experts are compared by score + bias, and so are groups, by the sum of their two best.
// Weights: score / (sum of the chosen ones in their order + 1e-20), * scale.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

void score_experts(const float* logits, const Routing& routing, float* scores) {
  const int count = routing.num_experts;
  F32x16 divisor = zero();
  if (!routing.sigmoid) {
    float shifted[kMaxExperts];
    scale_row(logits, count, find_peak(logits, count).value, 1.0f, shifted, scores);
    divisor = broadcast(static_cast<float>(sum_row(scores, count)));
  }
  for (int i = 0; i < count; i += kLanes) {
    const int n = count - i < kLanes ? count - i : kLanes;
    const F32x16 one = broadcast(1.0f);
    const F32x16 score = routing.sigmoid ? div(one, add(one, exp(sub(zero(), load_first(logits + i, n)))))
                                         : div(load_first(scores + i, n), divisor);
    store_first(scores + i, score, n);
  }
}

// The number of the largest, the first among equals, which counts no more from then on.
int take_largest(float* x, int count) {
  const int index = find_peak(x, count).index;
  x[index] = -infinity();
  return index;
}

// Leaves nothing to choose outside the best groups.
void keep_groups(const Routing& routing, float* merits) {
  const int size = routing.num_experts / routing.num_groups;
  float groups[kMaxExperts];
  bool kept[kMaxExperts] = {};
  for (int g = 0; g < routing.num_groups; ++g) {
    const float* members = merits + g * size;
    float best = -infinity(), second = -infinity();
    for (int i = 0; i < size; ++i) {
      second = members[i] > best ? best : members[i] > second ? members[i] : second;
      best = members[i] > best ? members[i] : best;
    }
    groups[g] = size > 1 ? best + second : best;
  }
  for (int i = 0; i < routing.top_groups; ++i) kept[take_largest(groups, routing.num_groups)] = true;
  for (int i = 0; i < routing.num_experts; ++i) merits[i] = kept[i / size] ? merits[i] : -infinity();
}

void route_row(const float* logits, const Routing& routing, int32_t* ids, float* weights) {
  float scores[kMaxExperts], merits[kMaxExperts];
  score_experts(logits, routing, scores);
  bool finite = true;
  for (int i = 0; i < routing.num_experts; ++i) {
    merits[i] = routing.bias ? scores[i] + routing.bias[i] : scores[i];
    finite &= merits[i] - merits[i] == 0.0f;
  }
  if (!finite) {
    for (int i = 0; i < routing.top_k; ++i) {
      ids[i] = i;
      weights[i] = __builtin_nanf("");
    }
    return;
  }
  if (routing.top_groups < routing.num_groups) keep_groups(routing, merits);
  float sum = 0.0f;
  for (int i = 0; i < routing.top_k; ++i) {
    ids[i] = take_largest(merits, routing.num_experts);
    weights[i] = scores[ids[i]];
    sum += weights[i];
  }
  for (int i = 0; i < routing.top_k; ++i) {
    if (routing.renormalize) weights[i] /= sum + 1e-20f;
    weights[i] *= routing.scale;
  }
}

}  // namespace

void route(const float* logits, const Routing& routing, int rows, int32_t* ids, float* weights) {
  for (int r = 0; r < rows; ++r) {
    const int64_t at = static_cast<int64_t>(r) * routing.top_k;
    route_row(logits + static_cast<int64_t>(r) * routing.num_experts, routing, ids + at, weights + at);
  }
}

}  // namespace paceline::PACELINE_LEVEL

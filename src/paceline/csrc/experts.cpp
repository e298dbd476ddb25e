#include "experts.h"

#include <algorithm>
#include <cstring>

#include "linear.h"

namespace paceline {
namespace {

// Tokens that go through the experts together: enough to use the weights of each well, few enough to bound the memory.
constexpr int64_t kMostTokens = 512;
// Numbers of a token that are combined by one thread.
constexpr int64_t kCombined = 512;
// What it takes to fetch a panel of weights, in rows that are multiplied with it.
constexpr int64_t kPanelCost = 4;

// The memory of a pass over so many (token, expert) pairs. Rows lie by expert.
struct Workspace {
  int32_t* places;   // [pairs]: the row of each
  float* rows;       // [pairs][width]: what goes in, then what comes out
  float* gate_up;    // [pairs][2 * hidden]
  float* activated;  // [pairs][hidden]
  uint8_t* linear;
  int64_t bytes = 0;

  Workspace(uint8_t* memory, int64_t pairs, const Experts& experts, const Kernels& kernels) {
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + bytes);
      bytes += align(count * static_cast<int64_t>(sizeof *array));
    };
    int64_t most = 0;
    for (const PackedLinear* weight : experts.all()) {
      most = std::max(most, linear_scratch(pairs, experts.count(), *weight, kernels));
    }
    take(places, pairs);
    take(rows, pairs * experts.width);
    take(gate_up, pairs * 2 * experts.hidden);
    take(activated, pairs * experts.hidden);
    take(linear, most);
  }
};

// Part of a line of items that begins at `before`: those of `count` items of equal cost that begin in a share of it.
Share part_of(Share share, int64_t before, int64_t count, int64_t cost = 1) {
  const auto first_from = [&](int64_t at) {
    return at <= before ? 0 : std::min(count, (at - before + cost - 1) / cost);
  };
  return {first_from(share.first), first_from(share.last)};
}

// One layer of all experts, each over its own rows.
class Layer {
 public:
  Layer(const Team& team, const int32_t* starts, const std::vector<const PackedLinear*>& weights, const float* x,
        float* out, uint8_t* scratch)
      : team_(team), starts_(starts), weights_(weights), x_(x), out_(out), scratch_(scratch) {}

  void run() const {
    int64_t cells = 0, cost = 0;
    for_each([&](const LinearCall& call, const PackedLinear& weight, int64_t rows) {
      cells += call.prepare_cells();
      for (const Section& section : weight.sections) cost += call.bands() * section.panels * cost_of(call, rows);
    });
    if (cells > 0) {
      prepare(team_.share(cells));
      team_.barrier();
    }
    multiply(team_.share(cost));
  }

 private:
  static int64_t cost_of(const LinearCall& call, int64_t rows) { return rows / call.bands() + kPanelCost; }

  // f(call, weight, rows) for each expert that has rows.
  template <class F>
  void for_each(F f) const {
    uint8_t* scratch = scratch_;
    for (size_t e = 0; e < weights_.size(); ++e) {
      const int64_t first = starts_[e], rows = starts_[e + 1] - first;
      if (rows == 0) continue;
      const PackedLinear& weight = *weights_[e];
      f(LinearCall(team_.kernels, x_ + first * weight.inputs, rows, weight, out_ + first * weight.outputs, scratch),
        weight, rows);
      scratch += linear_scratch(rows, weight, team_.kernels);
    }
  }

  void prepare(Share mine) const {
    int64_t before = 0;
    for_each([&](const LinearCall& call, const PackedLinear&, int64_t) {
      const int64_t cells = call.prepare_cells();
      call.prepare(part_of(mine, before, cells));
      before += cells;
    });
  }

  void multiply(Share mine) const {
    int64_t before = 0;
    for_each([&](const LinearCall& call, const PackedLinear& weight, int64_t rows) {
      int64_t column = 0;
      for (const Section& section : weight.sections) {
        const int64_t cells = call.bands() * section.panels, cost = cost_of(call, rows);
        call.multiply(section, column, part_of(mine, before, cells, cost));
        before += cells * cost;
        column += section.outputs;
      }
    });
  }

  const Team& team_;
  const int32_t* starts_;
  const std::vector<const PackedLinear*>& weights_;
  const float* x_;
  float* out_;
  uint8_t* scratch_;
};

// Finds out where each expert's rows begin, and copies this thread's share of the pairs there. Each thread counts for
// itself; pairs of an expert keep their order.
void gather(const Team& team, const float* x, int64_t pairs, const ExpertChoice& choice, const Experts& experts,
            const Workspace& space, int32_t (&starts)[kMaxExperts + 1]) {
  int32_t next[kMaxExperts] = {};
  std::fill(starts, starts + experts.count() + 1, 0);
  const Share mine = team.share(pairs);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (pair == mine.first) std::copy(starts + 1, starts + 1 + experts.count(), next);
    ++starts[choice.ids[pair] + 1];
  }
  for (int e = 0; e < experts.count(); ++e) {
    starts[e + 1] += starts[e];
    next[e] += starts[e];
  }
  for (int64_t pair = mine.first; pair < mine.last; ++pair) {
    const int32_t place = next[choice.ids[pair]]++;
    space.places[pair] = place;
    std::memcpy(space.rows + place * static_cast<int64_t>(experts.width), x + pair / choice.top_k * experts.width,
                sizeof(float) * static_cast<size_t>(experts.width));
  }
}

void combine(const Team& team, int64_t tokens, const ExpertChoice& choice, const Experts& experts,
             const Workspace& space, float* out) {
  const int64_t width = experts.width, parts = (width + kCombined - 1) / kCombined;
  const Share mine = team.share(tokens * parts);
  for (int64_t cell = mine.first; cell < mine.last; ++cell) {
    const int64_t token = cell / parts, column = cell % parts * kCombined;
    team.kernels.combine_rows(space.rows + column, width, space.places + token * choice.top_k,
                              choice.weights + token * choice.top_k, choice.top_k,
                              static_cast<int>(std::min(kCombined, width - column)), out + token * width + column);
  }
}

void run_together(const Team& team, const float* x, int64_t tokens, const ExpertChoice& choice, const Experts& experts,
                  Function function, float* out, const Workspace& space) {
  const int64_t pairs = tokens * choice.top_k;
  int32_t starts[kMaxExperts + 1];
  gather(team, x, pairs, choice, experts, space, starts);
  team.barrier();
  Layer(team, starts, experts.gate_up, space.rows, space.gate_up, space.linear).run();
  team.barrier();
  const Share mine = team.share(pairs);
  team.kernels.gated_activation(space.gate_up + mine.first * 2 * experts.hidden, function,
                                static_cast<int>(mine.last - mine.first), experts.hidden,
                                space.activated + mine.first * experts.hidden);
  team.barrier();
  Layer(team, starts, experts.down, space.activated, space.rows, space.linear).run();
  team.barrier();
  combine(team, tokens, choice, experts, space, out);
}

}  // namespace

int64_t experts_scratch(int64_t rows, int top_k, const Experts& experts, const Kernels& kernels) {
  return Workspace(nullptr, std::min(rows, kMostTokens) * top_k, experts, kernels).bytes;
}

void run_experts(const Team& team, const float* x, int64_t rows, const ExpertChoice& choice, const Experts& experts,
                 Function function, float* out, uint8_t* scratch) {
  const Workspace space(scratch, std::min(rows, kMostTokens) * choice.top_k, experts, team.kernels);
  for (int64_t first = 0; first < rows; first += kMostTokens) {
    if (first > 0) team.barrier();
    const int64_t tokens = std::min(kMostTokens, rows - first), pair = first * choice.top_k, at = first * experts.width;
    run_together(team, x + at, tokens, {choice.ids + pair, choice.weights + pair, choice.top_k}, experts, function,
                 out + at, space);
  }
}

}  // namespace paceline

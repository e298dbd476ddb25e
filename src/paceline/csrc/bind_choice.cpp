// The choice of tokens as Python calls it.
#include "bindings.h"
#include "choice.h"

namespace paceline::bindings {
namespace {

// Lists of token ids by row: starts [rows + 1], and as many ids as the last one says.
void require_lists(const char* name, const Ints& starts, const Ints& ids, int64_t rows, int64_t width) {
  require_length("starts", starts, rows + 1);
  if (starts.data()[0] != 0) refuse(std::string(name) + "_starts must begin with 0");
  for (int64_t r = 0; r < rows; ++r) {
    if (starts.data()[r] > starts.data()[r + 1]) refuse(std::string(name) + "_starts must ascend");
  }
  // More ids than the rows use are checked too.
  const int64_t count = static_cast<int64_t>(ids.shape(0));
  if (starts.data()[rows] > count) refuse(std::string(name) + "_ids are fewer than " + name + "_starts say");
  require_range("token id outside the vocabulary: id", ids.data(), count, width);
}

void edit_logits(Cpu& cpu, const FloatRowsOut& logits, int vocab_size, const Ints& allowed_rows,
                 const Array<const uint32_t, 2>& allowed_bits, const Ints& bias_starts, const Ints& bias_ids,
                 const Floats& bias_values, const Ints& seen_starts, const Ints& seen_ids, const Ints& seen_counts,
                 const Floats& repetition, const Floats& frequency, const Floats& presence, const Ints& banned_starts,
                 const Ints& banned_ids) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0)), width = static_cast<int64_t>(logits.shape(1));
  require(vocab_size >= 0, "vocab_size must not be negative");
  require_range("allowed row", allowed_rows.data(), static_cast<int64_t>(allowed_rows.shape(0)), rows);
  if (allowed_rows.shape(0) > 0) {
    require_shape("allowed_bits", allowed_bits, static_cast<int64_t>(allowed_rows.shape(0)), (width + 31) / 32);
  }
  require_lists("bias", bias_starts, bias_ids, rows, width);
  require_length("bias_values", bias_values, static_cast<int64_t>(bias_ids.shape(0)));
  require_lists("seen", seen_starts, seen_ids, rows, width);
  require_length("seen_counts", seen_counts, static_cast<int64_t>(seen_ids.shape(0)));
  require_lists("banned", banned_starts, banned_ids, rows, width);
  require_length("repetition", repetition, rows);
  require_length("frequency", frequency, rows);
  require_length("presence", presence, rows);
  const EditLists edits{vocab_size,          allowed_rows.data(), static_cast<int>(allowed_rows.shape(0)),
                        allowed_bits.data(), (width + 31) / 32,   bias_starts.data(),
                        bias_ids.data(),     bias_values.data(),  seen_starts.data(),
                        seen_ids.data(),     seen_counts.data(),  repetition.data(),
                        frequency.data(),    presence.data(),     banned_starts.data(),
                        banned_ids.data()};
  const Turn turn(cpu);
  run_rows(cpu, rows, width,
           [&](const Team& team) { paceline::edit_logits(team, logits.data(), rows, static_cast<int>(width), edits); });
}

void choose(Cpu& cpu, const FloatRows& logits, const Floats& temperature, const Ints& top_k, const Floats& top_p,
            const Floats& min_p, const Array<const uint64_t, 1>& seeds, const Ints& positions, const IntsOut& chosen) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0));
  require_length("temperature", temperature, rows);
  require_length("top_k", top_k, rows);
  require_length("top_p", top_p, rows);
  require_length("min_p", min_p, rows);
  require_length("seeds", seeds, rows);
  require_length("positions", positions, rows);
  require_length("chosen", chosen, rows);
  const ChoiceRules rules{temperature.data(), top_k.data(), top_p.data(), min_p.data(), seeds.data(), positions.data()};
  const Turn turn(cpu);
  const int width = static_cast<int>(logits.shape(1));
  run_rows(cpu, rows, width, choice_scratch(width, cpu.machine.pool.size()), [&](const Team& team, uint8_t* scratch) {
    paceline::choose(team, logits.data(), rows, width, rules, chosen.data(), scratch);
  });
}

void top_logprobs(Cpu& cpu, const FloatRows& logits, const Ints& chosen, const FloatsOut& chosen_values,
                  const IntsOut& ranks, const IntRowsOut& top_ids, const FloatRowsOut& top_values) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0)), width = static_cast<int64_t>(logits.shape(1));
  const int64_t k = static_cast<int64_t>(top_ids.shape(1));
  require_length("chosen", chosen, rows);
  require_range("token id outside the vocabulary: chosen id", chosen.data(), rows, width);
  require_length("chosen_values", chosen_values, rows);
  require_length("ranks", ranks, rows);
  require_shape("top_ids", top_ids, rows, k);
  require_shape("top_values", top_values, rows, k);
  require(k <= width, "k must not exceed the width");
  const Turn turn(cpu);
  const int64_t scratch_bytes = choice_scratch(static_cast<int>(width), cpu.machine.pool.size());
  run_rows(cpu, rows, width, scratch_bytes, [&](const Team& team, uint8_t* scratch) {
    paceline::top_logprobs(team, logits.data(), rows, static_cast<int>(width), chosen.data(), static_cast<int>(k),
                           chosen_values.data(), ranks.data(), top_ids.data(), top_values.data(), scratch);
  });
}

}  // namespace

void bind_choice(nb::class_<Cpu>& cpu) {
  cpu.def("edit_logits", &edit_logits, nb::arg("logits").noconvert(), nb::arg("vocab_size"),
          nb::arg("allowed_rows").noconvert(), nb::arg("allowed_bits").noconvert(), nb::arg("bias_starts").noconvert(),
          nb::arg("bias_ids").noconvert(), nb::arg("bias_values").noconvert(), nb::arg("seen_starts").noconvert(),
          nb::arg("seen_ids").noconvert(), nb::arg("seen_counts").noconvert(), nb::arg("repetition").noconvert(),
          nb::arg("frequency").noconvert(), nb::arg("presence").noconvert(), nb::arg("banned_starts").noconvert(),
          nb::arg("banned_ids").noconvert())
      .def("choose", &choose, nb::arg("logits").noconvert(), nb::arg("temperature").noconvert(),
           nb::arg("top_k").noconvert(), nb::arg("top_p").noconvert(), nb::arg("min_p").noconvert(),
           nb::arg("seeds").noconvert(), nb::arg("positions").noconvert(), nb::arg("chosen").noconvert())
      .def("top_logprobs", &top_logprobs, nb::arg("logits").noconvert(), nb::arg("chosen").noconvert(),
           nb::arg("chosen_values").noconvert(), nb::arg("ranks").noconvert(), nb::arg("top_ids").noconvert(),
           nb::arg("top_values").noconvert());
}

}  // namespace paceline::bindings

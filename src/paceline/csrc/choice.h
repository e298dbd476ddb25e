// The choice of tokens from rows of logits, one row by one thread.
#pragma once
#include <cstdint>

#include "team.h"

namespace paceline {

// As LogitEdits in tensors.py, which states order and formulas.
struct EditLists {
  int vocab_size;
  const int32_t* allowed_rows;
  int num_allowed;
  const uint32_t* allowed_bits;
  int64_t allowed_words;
  const int32_t *bias_starts, *bias_ids;
  const float* bias_values;
  const int32_t *seen_starts, *seen_ids, *seen_counts;
  const float *repetition, *frequency, *presence;
  const int32_t *banned_starts, *banned_ids;
};
void edit_logits(const Team& team, float* logits, int64_t rows, int width, const EditLists& edits);

// As ChoiceControls in tensors.py; ops/api.py states the rules, ops/noise.py the noise.
struct ChoiceRules {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const uint64_t* seeds;
  const int32_t* positions;
};
void choose(const Team& team, const float* logits, int64_t rows, int width, const ChoiceRules& rules, int32_t* chosen,
            uint8_t* scratch);

// k is at most the width. A row whose largest logit is not finite, or that has a NaN, gets NaN, rank 0 and ids 0.
void top_logprobs(const Team& team, const float* logits, int64_t rows, int width, const int32_t* chosen, int k,
                  float* chosen_values, int32_t* ranks, int32_t* top_ids, float* top_values, uint8_t* scratch);

// Of choose and top_logprobs, each.
int64_t choice_scratch(int width, int threads);

}  // namespace paceline

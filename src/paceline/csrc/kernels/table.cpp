// The table of one level.
#include "level_kernels.h"
#include "simd.h"

#define PACELINE_TEXT(x) #x
#define PACELINE_NAME(x) PACELINE_TEXT(x)

namespace paceline::PACELINE_LEVEL {

extern const Kernels table;
const Kernels table = {
    PACELINE_NAME(PACELINE_LEVEL),
    kDenseRows,
    quantize_rows,
    linear_int8,
    linear_int4,
    linear_dense,
#if defined(__AMX_BF16__)
    "bf16-tiles",
    kBlockRows,
    round_row,
    linear_bf16,
#elif defined(__AVX512BF16__)
    "bf16-dot",
    kDenseRows,
    round_row,
    linear_bf16,
#else
    nullptr,
    0,
    nullptr,
    nullptr,
#endif
    quantize_weights_int8,
    quantize_weights_int4,
    rms_norm,
    add_rms_norm,
    qk_norm,
    layer_norm,
    rope,
    gated_activation,
    route,
    combine_rows,
    activate,
    add_to,
    softcap,
    write_kv,
    attention,
    pack_segment,
    encoder_attention,
    find_peak,
    scale_row,
    sum_row,
    count_at_least,
    collect_at_least,
    collect_contenders,
};

}  // namespace paceline::PACELINE_LEVEL

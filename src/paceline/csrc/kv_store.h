// Keys and values of all layers, in blocks of tokens.
#pragma once
#include <cstdint>

#include "buffer.h"
#include "kernels/kernels.h"

namespace paceline {

struct KvStore {
  int num_layers, num_blocks;
  int64_t layer_stride;
  KvView view;  // of layer 0
  Buffer memory;

  // Throws std::invalid_argument for numbers that no store can have.
  KvStore(int num_layers, int num_kv, int head_dim, int num_blocks, int block_size);

  int64_t num_rows() const { return static_cast<int64_t>(num_blocks) * view.block_size; }

  // Throws std::invalid_argument for a layer that is not there, or kept with other heads.
  void require_layer(int index, HeadShape heads) const;

  KvView layer(int index) const {
    KvView kv = view;
    kv.data += index * layer_stride;
    return kv;
  }
};

int64_t kv_block_bytes(int num_layers, int num_kv, int head_dim, int block_size);

}  // namespace paceline

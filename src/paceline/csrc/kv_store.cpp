#include "kv_store.h"

#include <string>

#include "checks.h"

namespace paceline {
namespace {

KvView kv_shape(int num_kv, int head_dim, int block_size) {
  require(block_size >= 1, "block_size must be at least 1, not " + std::to_string(block_size));
  require(head_dim > 0 && head_dim % 2 == 0, "head_dim must be even, not " + std::to_string(head_dim));
  require(num_kv > 0, "num_kv must be at least 1");
  KvView kv{nullptr, 0, 0, block_size, head_dim, num_kv};
  kv.head_stride = kv.keys_size() + kv.values_size();
  kv.block_stride = kv.head_stride * num_kv;
  return kv;
}

}  // namespace

KvStore::KvStore(int num_layers, int num_kv, int head_dim, int num_blocks, int block_size)
    : num_layers(num_layers), num_blocks(num_blocks), view(kv_shape(num_kv, head_dim, block_size)) {
  require(num_layers > 0 && num_blocks >= 0, "a store needs layers, and no negative number of blocks");
  layer_stride = view.block_stride * num_blocks;
  memory = Buffer(layer_stride * num_layers * static_cast<int64_t>(sizeof(uint16_t)));
  view.data = reinterpret_cast<uint16_t*>(memory.data());
}

void KvStore::require_layer(int index, HeadShape heads) const {
  require(heads.num_kv == view.num_kv && heads.head_dim == view.head_dim,
          "the heads differ from those of the key-value store");
  require_range("layer", &index, 1, num_layers);
}

int64_t kv_block_bytes(int num_layers, int num_kv, int head_dim, int block_size) {
  return kv_shape(num_kv, head_dim, block_size).block_stride * num_layers * static_cast<int64_t>(sizeof(uint16_t));
}

}  // namespace paceline

// Random words of a block on the CPU. Compiled once for all codecs: inlined into each loop that
// rounds at random, they would be most of its code and of its compilation.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codecs/base/codec.h"

namespace pycomm::codecs {

/// Computes random_words() of the values `index` to `index` + n, rounded up to fours; at most 2048.
void random_block(const RandomKey& key, uint64_t index, size_t n, uint32_t* words);

}  // namespace pycomm::codecs

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the only
// source of random bits, for gcc, nvcc and, restated as tl.philox, for Triton.
//
// The random word of value `index` of a tensor is a function of (seed, step, tensor, index) alone:
//   key     = (low half of seed, high half of seed)
//   counter = (low half of index / 4, high half of index / 4, tensor, step)
//   word    = philox4x32_10(counter, key)[index % 4]
// In Triton: tl.philox(seed, group_low, group_high, tensor, step) gives the four words of a group;
// with tensor = step = 0 that is tl.randint4x(seed, group).
#pragma once
#include "core/types.h"

namespace pycomm {

struct Random4 {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53;
constexpr uint32_t kPhiloxFactor1 = 0xCD9E8D57;
/// Increments of the two halves of the key in each round.
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9;
constexpr uint32_t kPhiloxKey1 = 0xBB67AE85;

PYCOMM_HD Random4 philox_round(Random4 c, uint32_t key0, uint32_t key1) {
  const uint64_t a = uint64_t{kPhiloxFactor0} * c.word[0];
  const uint64_t b = uint64_t{kPhiloxFactor1} * c.word[2];
  return {{static_cast<uint32_t>(b >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(b),
           static_cast<uint32_t>(a >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(a)}};
}

PYCOMM_HD Random4 philox4x32_10(Random4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; round++) {
    counter = philox_round(counter, key0, key1);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return counter;
}

/// Returns the words of the values 4 * group to 4 * group + 3.
PYCOMM_HD Random4 random_words(uint64_t seed, uint32_t step, uint32_t tensor, uint64_t group) {
  return philox4x32_10(
      {{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), tensor, step}},
      static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace pycomm

// Random words of a block: those of core/philox.h, many at a time, compiled for several x86 levels.
#include "codecs/base/random.h"

#include <algorithm>
#include <cstring>

#include "codecs/base/targets.h"
#include "core/philox.h"

namespace pycomm::codecs {
namespace {

/// Returns the place of a group of four words in its tensor; indices are modulo 2^64.
PYCOMM_HD uint64_t random_group(uint64_t index, size_t g) {
  return (index / 4 + g) & ((uint64_t{1} << 62) - 1);
}

/// Computes round after round over arrays, since gcc vectorises that with half the multiplications
/// (measured: 1.2 to 1.4 times faster than group after group).
PYCOMM_SIMD void random_block_plain(const RandomKey& key, uint64_t index, size_t n,
                                    uint32_t* __restrict words) {
  constexpr size_t kGroups = 512;
  alignas(64) uint32_t c[4][kGroups];
  const size_t groups = (n + 3) / 4;
  for (size_t g = 0; g < groups; g++) {
    const uint64_t group = random_group(index, g);
    c[0][g] = static_cast<uint32_t>(group);
    c[1][g] = static_cast<uint32_t>(group >> 32);
    c[2][g] = key.tensor;
    c[3][g] = key.step;
  }
  auto key0 = static_cast<uint32_t>(key.seed);
  auto key1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; round++) {
    for (size_t g = 0; g < groups; g++) {
      const Random4 four = philox_round({{c[0][g], c[1][g], c[2][g], c[3][g]}}, key0, key1);
      c[0][g] = four.word[0];
      c[1][g] = four.word[1];
      c[2][g] = four.word[2];
      c[3][g] = four.word[3];
    }
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  for (size_t g = 0; g < groups; g++) {
    words[4 * g] = c[0][g];
    words[4 * g + 1] = c[1][g];
    words[4 * g + 2] = c[2][g];
    words[4 * g + 3] = c[3][g];
  }
}

#ifdef PYCOMM_AVX2

using Lanes = uint64_t __attribute__((vector_size(32)));

/// Multiplies the lower halves.
PYCOMM_AVX2 inline Lanes multiply(Lanes c, uint64_t factor) {
  return reinterpret_cast<Lanes>(_mm256_mul_epu32(
      reinterpret_cast<__m256i>(c), _mm256_set1_epi64x(static_cast<int64_t>(factor))));
}

/// Computes four groups at a time, twice: while one product is computed, the other set's is used. A
/// word is the lower half of a lane of 64 bits, which the multiplication reads and in which it
/// leaves its own lower half; nothing reads the upper halves until the end. Keys are vectors in
/// memory, which take less time than to be made of words in each step.
PYCOMM_AVX2 void random_block_avx2(const RandomKey& key, uint64_t index, size_t n,
                                   uint32_t* __restrict words) {
  constexpr uint64_t kLower = 0xffffffff;
  // Even lanes hold the first two groups, odd ones the others, in the order in which they are
  // stored.
  constexpr Lanes kOrder = {0, 2, 1, 3};
  Lanes keys[kPhiloxRounds][2];
  auto key0 = static_cast<uint32_t>(key.seed);
  auto key1 = static_cast<uint32_t>(key.seed >> 32);
  for (auto& of_round : keys) {
    of_round[0] = Lanes{} + key0;
    of_round[1] = Lanes{} + key1;
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  const size_t size = (n + 3) / 4 * 4;
  for (size_t i = 0; i < size; i += 32) {
    Lanes c0[2], c1[2], c2[2], c3[2];
    for (size_t set = 0; set < 2; set++) {
      c0[set] = (index / 4 + i / 4 + 4 * set + kOrder) & ((uint64_t{1} << 62) - 1);
      c1[set] = c0[set] >> 32;
      c2[set] = Lanes{} + key.tensor;
      c3[set] = Lanes{} + key.step;
    }
    for (const auto& of_round : keys) {
      for (size_t set = 0; set < 2; set++) {
        const Lanes a = multiply(c0[set], kPhiloxFactor0);
        const Lanes b = multiply(c2[set], kPhiloxFactor1);
        c0[set] = b >> 32 ^ c1[set] ^ of_round[0];
        c2[set] = a >> 32 ^ c3[set] ^ of_round[1];
        c1[set] = b;
        c3[set] = a;
      }
    }
    __m256i eight[4];
    for (size_t set = 0; set < 2; set++) {
      const auto upper = reinterpret_cast<__m256i>((c0[set] & kLower) | c1[set] << 32);
      const auto lower = reinterpret_cast<__m256i>((c2[set] & kLower) | c3[set] << 32);
      eight[2 * set] = _mm256_unpacklo_epi64(upper, lower);
      eight[2 * set + 1] = _mm256_unpackhi_epi64(upper, lower);
    }
    if (size - i >= 32) {
      std::memcpy(words + i, eight, sizeof eight);
    } else {
      std::memcpy(words + i, eight, (size - i) * sizeof(uint32_t));
    }
  }
}

#endif

}  // namespace

void random_block(const RandomKey& key, uint64_t index, size_t n, uint32_t* words) {
#ifdef PYCOMM_AVX2
  if (has_avx2()) return random_block_avx2(key, index, n, words);
#endif
  random_block_plain(key, index, n, words);
}

}  // namespace pycomm::codecs

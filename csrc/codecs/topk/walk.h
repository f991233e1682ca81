// Iteration over the values that topk chose, in the order of their indices. Included by topk.cpp
// only.
#pragma once
#include <cstring>

#include "codecs/topk/select.h"

namespace pycomm::codecs::topk {

/// Chosen values on their way to the payload, in the order of their indices. They are passed to a
/// Writer in groups: writer.group(index, p, count), where only the last has fewer than kGroup.
template <typename Writer>
struct Staging {
  explicit Staging(Writer& writer) : writer(writer) {}

  Writer& writer;
  size_t count = 0;
  alignas(64) uint32_t index[kGroup + 16];
  alignas(64) float p[kGroup + 16];

  PYCOMM_INLINE void flush_full() {
    if (count < kGroup) return;
    writer.group(index, p, kGroup);
    count -= kGroup;
    std::memcpy(index, index + kGroup, count * 4);
    std::memcpy(p, p + kGroup, count * 4);
  }
};

template <bool kFeedback, typename Writer>
void walk_plain(const Source& from, size_t begin, Cut cut, float* new_residual,
                Staging<Writer>& staging) {
  for (size_t i = begin; i < from.n; i++) {
    const float p = kFeedback ? from.x[i] + from.residual[i] : from.x[i];
    const uint32_t bits = magnitude_bits(p);
    const bool tie = bits == cut.bits && cut.ties > 0;
    if (bits > cut.bits || tie) {
      cut.ties -= tie;
      staging.index[staging.count] = static_cast<uint32_t>(i);
      staging.p[staging.count++] = p;
      staging.flush_full();
    } else if (kFeedback) {
      new_residual[i] = p;
    }
  }
}

#ifdef PYCOMM_AVX512

template <bool kFeedback, typename Writer>
PYCOMM_AVX512 void walk_avx512(const Source& from, Cut cut, float* new_residual,
                               Staging<Writer>& staging) {
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(cut.bits));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  size_t i = 0;
  for (; i + 16 <= from.n; i += 16) {
    const __m512 p = load_sum<kFeedback>(from, i);
    const __m512i bits = magnitudes(p);
    __mmask16 chosen = _mm512_cmpgt_epi32_mask(bits, limit);
    if (cut.ties > 0) {
      uint32_t equal = _mm512_cmpeq_epi32_mask(bits, limit);
      // Keeps the lowest of them: deposits ones into the first `ties` places.
      if (cut.ties < 16) equal = _pdep_u32((1u << cut.ties) - 1, equal);
      cut.ties -= static_cast<size_t>(_mm_popcnt_u32(equal));
      chosen |= static_cast<__mmask16>(equal);
    }
    if (kFeedback) _mm512_mask_storeu_ps(new_residual + i, ~chosen, p);
    if (chosen == 0) continue;
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lanes);
    _mm512_storeu_si512(staging.index + staging.count, _mm512_maskz_compress_epi32(chosen, index));
    _mm512_storeu_ps(staging.p + staging.count, _mm512_maskz_compress_ps(chosen, p));
    staging.count += static_cast<size_t>(_mm_popcnt_u32(chosen));
    staging.flush_full();
  }
  walk_plain<kFeedback>(from, i, cut, new_residual, staging);
}

#endif

/// Passes the values that the cut chooses to the writer, in order. With a residual, values that are
/// not chosen go to `new_residual`, which may be the residual; the writer handles the others.
template <typename Writer>
void walk(const Source& from, const Cut& cut, float* new_residual, Writer& writer) {
  Staging<Writer> staging(writer);
#ifdef PYCOMM_AVX512
  if (has_avx512()) {
    from.residual ? walk_avx512<true>(from, cut, new_residual, staging)
                  : walk_avx512<false>(from, cut, new_residual, staging);
  } else
#endif
  {
    from.residual ? walk_plain<true>(from, 0, cut, new_residual, staging)
                  : walk_plain<false>(from, 0, cut, new_residual, staging);
  }
  if (staging.count > 0) writer.group(staging.index, staging.p, staging.count);
}

}  // namespace pycomm::codecs::topk

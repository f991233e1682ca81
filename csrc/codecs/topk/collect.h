// Candidate collection: one pass over a long record keeps all values from a magnitude on, with
// their places. The cut is then found among these few, and only they are visited: memory, which
// takes the time of long records, is read once. Included by topk.cpp only.
#pragma once
#include <optional>
#include <vector>

#include "codecs/topk/record.h"

namespace pycomm::codecs::topk {

/// Values from a magnitude on, in the order of their places. There are none beyond `room`.
struct Candidates {
  explicit Candidates(size_t most)
      : room(most + kBurst), index(new uint32_t[room]), p(new float[room]) {}

  /// Values between two checks of the room that is left.
  static constexpr size_t kBurst = 1024;

  size_t room;
  std::unique_ptr<uint32_t[]> index;
  std::unique_ptr<float[]> p;
  size_t count = 0;
  uint32_t top = 0;    ///< the largest magnitude of all
  bool whole = false;  ///< there was room for all of them

  Source source() const { return {p.get(), nullptr, count}; }
};

template <bool kFeedback, bool kStore>
void collect_plain(const Source& from, size_t begin, size_t end, uint32_t low, float* new_residual,
                   Candidates& to) {
  constexpr size_t kStep = 32;
  for (size_t i = begin; i < end; i += kStep) {
    const size_t size = std::min(kStep, end - i);
    // This loop becomes vectors; few steps have a candidate.
    uint32_t top = 0;
    for (size_t j = i; j < i + size; j++) {
      const float p = kFeedback ? from.x[j] + from.residual[j] : from.x[j];
      if (kStore) new_residual[j] = p;
      const uint32_t bits = magnitude_bits(p);
      top = bits > top ? bits : top;
    }
    to.top = std::max(to.top, top);
    if (top < low) continue;
    for (size_t j = i; j < i + size; j++) {
      const float p = kFeedback ? from.x[j] + from.residual[j] : from.x[j];
      to.index[to.count] = static_cast<uint32_t>(j);
      to.p[to.count] = p;
      to.count += magnitude_bits(p) >= low;
    }
  }
}

#ifdef PYCOMM_AVX512

template <bool kFeedback, bool kStore>
PYCOMM_AVX512 void collect_avx512(const Source& from, size_t begin, size_t end, uint32_t low,
                                  float* new_residual, Candidates& to) {
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(low));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i top = _mm512_set1_epi32(static_cast<int>(to.top));
  size_t count = to.count, i = begin;
  for (; i + 16 <= end; i += 16) {
    const __m512 p = load_sum<kFeedback>(from, i);
    if (kStore) _mm512_storeu_ps(new_residual + i, p);
    const __m512i bits = magnitudes(p);
    top = _mm512_mask_max_epi32(top, 0xffff, top, bits);  // without a mask gcc 12 warns
    const __mmask16 chosen = _mm512_cmpge_epi32_mask(bits, limit);
    if (chosen == 0) continue;
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lanes);
    _mm512_storeu_si512(to.index.get() + count, _mm512_maskz_compress_epi32(chosen, index));
    _mm512_storeu_ps(to.p.get() + count, _mm512_maskz_compress_ps(chosen, p));
    count += static_cast<size_t>(_mm_popcnt_u32(chosen));
  }
  alignas(64) uint32_t tops[16];
  _mm512_store_si512(tops, top);
  to.top = *std::max_element(tops, tops + 16);
  to.count = count;
  collect_plain<kFeedback, kStore>(from, i, end, low, new_residual, to);
}

#endif

/// Fills `to` with all values from `low` on. With `new_residual`, which must not be the residual, p
/// goes there.
template <bool kFeedback, bool kStore>
void collect(const Source& from, uint32_t low, float* new_residual, Candidates& to) {
  to.count = 0;
  to.top = 0;
  for (size_t begin = 0; begin < from.n; begin += Candidates::kBurst) {
    if (to.count + Candidates::kBurst > to.room) {
      to.whole = false;
      return;
    }
    const size_t end = std::min(begin + Candidates::kBurst, from.n);
#ifdef PYCOMM_AVX512
    if (has_avx512()) {
      collect_avx512<kFeedback, kStore>(from, begin, end, low, new_residual, to);
      continue;
    }
#endif
    collect_plain<kFeedback, kStore>(from, begin, end, low, new_residual, to);
  }
  to.whole = true;
}

inline void collect(const Source& from, uint32_t low, float* new_residual, Candidates& to) {
  if (!from.residual) return collect<false, false>(from, low, nullptr, to);
  new_residual != from.residual ? collect<true, true>(from, low, new_residual, to)
                                : collect<true, false>(from, low, nullptr, to);
}

/// Passes the chosen candidates of the cut to the writer, in order.
template <typename Writer>
void walk_candidates(const Candidates& candidates, Cut cut, Writer& writer) {
  // Groups of chosen values move to the front, where they overwrite no later one.
  uint32_t* index = candidates.index.get();
  float* p = candidates.p.get();
  size_t chosen = 0;
  for (size_t i = 0; i < candidates.count; i++) {
    const uint32_t bits = magnitude_bits(p[i]);
    const bool tie = bits == cut.bits && cut.ties > 0;
    cut.ties -= tie;
    index[chosen] = index[i];
    p[chosen] = p[i];
    chosen += bits > cut.bits || tie;
  }
  for (size_t first = 0; first < chosen; first += kGroup) {
    writer.group(index + first, p + first, std::min<size_t>(kGroup, chosen - first));
  }
}

/// Returns the cut of the k largest of a record. `found` gets the candidates that contain them, or
/// none if they were too many to be kept; then p is in `new_residual` already if that is not the
/// residual.
inline Cut find_cut(const Source& from, size_t k, uint32_t limit, float* new_residual,
                    std::optional<Candidates>& found) {
  if (from.n > kSampled) {
    std::vector<uint32_t> some(std::min(kRoom, std::max<size_t>(4096, from.n / 256)));
    const Bracket b = sampled_bracket(from, k, some.data(), some.size());
    const size_t most = 2 * b.expected + 4096;
    if (most <= from.n / 4) {
      found.emplace(most);
      collect(from, b.low, new_residual, *found);
      if (found->whole) {
        some.resize(found->count + 16);
        const Counts counts = count_around(found->source(), b, some.data(), some.size());
        Cut cut;
        if (cut_in(counts, b, k, some.data(), cut)) {
          cut.is_void = found->top >= limit;
          return cut;
        }
      }
      found.reset();
    }
  }
  return Finder(from.n, limit).find(from, k);
}

/// Writes the record of a cut.
inline void write_record(const Record& record, const Cut& cut, const Source& from,
                         float* new_residual, const std::optional<Candidates>& found, uint8_t* to) {
  if (!found || cut.is_void) return encode_record(record, cut, from, new_residual, to);
  // The residual of values that are not chosen is all of p: the writer changes the others.
  if (new_residual && new_residual == from.residual) {
    for (size_t i = 0; i < from.n; i++) new_residual[i] = from.x[i] + new_residual[i];
  }
  clear_padding(record, to);
  Writer writer(record, to, from.residual, new_residual);
  walk_candidates(*found, cut, writer);
}

}  // namespace pycomm::codecs::topk

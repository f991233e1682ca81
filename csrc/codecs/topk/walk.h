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
  alignas(64) uint32_t index[kGroup + kAtOnce];
  alignas(64) float p[kGroup + kAtOnce];

  PYCOMM_INLINE void flush_full() {
    if (count < kGroup) return;
    writer.group(index, p, kGroup);
    count -= kGroup;
    std::memcpy(index, index + kGroup, count * 4);
    std::memcpy(p, p + kGroup, count * 4);
  }
};

namespace {

template <bool kFeedback, typename Writer>
PYCOMM_SIMD void walk_all(const Source& from, Cut cut, float* new_residual,
                          Staging<Writer>& staging) {
  Step step;
  for (size_t begin = 0; begin < from.n; begin += kAtOnce) {
    step.load<kFeedback>(from, begin, from.n);
    step.for_each_from(cut.bits, [&](size_t i, uint32_t bits) {
      if (bits == cut.bits && cut.ties == 0) return;
      cut.ties -= bits == cut.bits;
      staging.index[staging.count] = static_cast<uint32_t>(begin + i);
      staging.p[staging.count++] = step.p[i];
    });
    // The writer changes those of the chosen values.
    if (kFeedback) std::memcpy(new_residual + begin, step.p, 4 * step.n);
    staging.flush_full();
  }
}

}  // namespace

/// Passes the values that the cut chooses to the writer, in order. With a residual, all values go
/// to `new_residual`, which may be the residual; the writer then changes those that are chosen.
template <typename Writer>
void walk(const Source& from, const Cut& cut, float* new_residual, Writer& writer) {
  Staging<Writer> staging(writer);
  from.residual ? walk_all<true>(from, cut, new_residual, staging)
                : walk_all<false>(from, cut, new_residual, staging);
  if (staging.count > 0) writer.group(staging.index, staging.p, staging.count);
}

}  // namespace pycomm::codecs::topk

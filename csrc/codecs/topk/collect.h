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
      : room(most + kAtOnce), index(new uint32_t[room]), p(new float[room]) {}

  size_t room;
  std::unique_ptr<uint32_t[]> index;
  std::unique_ptr<float[]> p;
  size_t count = 0;
  uint32_t top = 0;    ///< the largest magnitude, if one is kept
  bool whole = false;  ///< there was room for all of them

  Source source() const { return {p.get(), nullptr, count}; }
};

namespace {

/// Fills `to` with all values from `low` on. With `new_residual`, which must not be the residual, p
/// goes there.
template <bool kFeedback, bool kStore>
PYCOMM_SIMD void collect(const Source& from, uint32_t low, float* new_residual, Candidates& to) {
  size_t count = 0;
  uint32_t* const index = to.index.get();
  float* const p = to.p.get();
  uint32_t top = 0;
  to.whole = false;
  Step step;
  for (size_t begin = 0; begin < from.n; begin += kAtOnce) {
    if (count + kAtOnce > to.room) return;
    step.load<kFeedback>(from, begin, from.n);
    if (kStore) std::memcpy(new_residual + begin, step.p, 4 * step.n);
    step.for_each_from(low, [&](size_t i, uint32_t bits) {
      top = bits > top ? bits : top;
      index[count] = static_cast<uint32_t>(begin + i);
      p[count++] = step.p[i];
    });
  }
  to.count = count;
  to.top = top;
  to.whole = true;
}

}  // namespace

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
        some.resize(found->count + kAtOnce);
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
  Writer writer(record, to, new_residual);
  walk_candidates(*found, cut, writer);
}

}  // namespace pycomm::codecs::topk

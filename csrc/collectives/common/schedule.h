// Index arithmetic of the collectives: one chunk per rank, many segments per chunk.
//
// A chunk is what a rank owns, that is, reduces for all; a segment is what travels at once. Both
// are cut only at multiples of a granule: a cache line for plain collectives; for coded ones the
// codec's block, counted from the start of each piece, so that the bytes of a tensor depend neither
// on its place in the bucket nor on the number of ranks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/common/shares.h"
#include "core/types.h"

namespace pycomm::schedule {

/// Range of the elements begin <= i < end of a buffer.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
};

inline size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0); }

/// Returns the elements in a cache line, at least 1: chunks cut there never share a line.
inline size_t line(size_t element_bytes) { return std::max<size_t>(1, 64 / element_bytes); }

/// Returns chunk `index` of `count`: chunks ascend, cover `numel` and, if shares are equal, differ
/// by one granule at most.
inline Range chunk(size_t numel, int count, int index, size_t granule, const Shares& shares = {}) {
  const size_t units = divide_up(numel, granule);
  if (!shares.equal()) {
    const auto start = [&](int k) { return std::min(numel, shares.begin(units, k) * granule); };
    return {start(index), start(index + 1)};
  }
  const size_t base = units / count, extra = units % count, i = static_cast<size_t>(index);
  const auto start = [&](size_t k) {
    return std::min(numel, (k * base + std::min(k, extra)) * granule);
  };
  return {start(i), start(i + 1)};
}

inline size_t num_segments(const Range& chunk, size_t segment_numel) {
  return divide_up(chunk.size(), segment_numel);
}

/// Returns segment `index` of a chunk: all have `segment_numel` elements but the last.
inline Range segment(const Range& chunk, size_t segment_numel, size_t index) {
  const size_t begin = chunk.begin + index * segment_numel;
  return {begin, std::min(chunk.end, begin + segment_numel)};
}

// ------------------------------------------------------------------ buckets of pieces

/// A part of a bucket that is cut only at multiples of its own granule.
struct Part {
  size_t offset = 0;  ///< in the bucket; parts ascend and cover it
  size_t numel = 0;
  size_t granule = 1;
};

/// Consecutive elements of one part.
struct Run {
  size_t part = 0;
  size_t offset = 0;  ///< in the part; a multiple of its granule
  size_t numel = 0;
};

/// Returns the largest place not after `place` where the bucket may be cut.
inline size_t cut(Span<const Part> parts, size_t place) {
  const Part* after = std::upper_bound(parts.begin(), parts.end(), place,
                                       [](size_t p, const Part& part) { return p < part.offset; });
  if (after == parts.begin()) return 0;
  const Part& part = after[-1];
  const size_t inside = place - part.offset;
  if (inside >= part.numel) return part.offset + part.numel;
  return part.offset + inside / part.granule * part.granule;
}

/// Returns chunk `index` of `count` of a bucket: each cut is less than a granule from the end of a
/// share.
inline Range chunk(Span<const Part> parts, size_t numel, int count, int index,
                   const Shares& shares = {}) {
  const auto start = [&](size_t k) {
    const size_t n = static_cast<size_t>(count);
    if (k == n) return numel;
    if (!shares.equal()) return cut(parts, shares.begin(numel, static_cast<int>(k)));
    return cut(parts, numel / n * k + numel % n * k / n);
  };
  return {start(static_cast<size_t>(index)), start(static_cast<size_t>(index) + 1)};
}

/// Calls f(range) for the segments of a chunk of a bucket, about `segment_numel` elements each;
/// none is empty.
template <typename F>
void for_segments(Span<const Part> parts, const Range& chunk, size_t segment_numel, const F& f) {
  size_t begin = chunk.begin;
  for (size_t goal = chunk.begin + segment_numel; begin < chunk.end; goal += segment_numel) {
    const size_t end = goal >= chunk.end ? chunk.end : cut(parts, goal);
    if (end > begin) f(Range{begin, end});
    begin = std::max(begin, end);
  }
}

/// Calls f(run) for the runs of `range`, whose ends are cuts.
template <typename F>
void for_runs(Span<const Part> parts, const Range& range, const F& f) {
  const Part* part = std::upper_bound(parts.begin(), parts.end(), range.begin,
                                      [](size_t p, const Part& q) { return p < q.offset; });
  if (part != parts.begin()) --part;
  for (; part != parts.end() && part->offset < range.end; ++part) {
    const size_t begin = std::max(range.begin, part->offset);
    const size_t end = std::min(range.end, part->offset + part->numel);
    if (begin < end)
      f(Run{static_cast<size_t>(part - parts.begin()), begin - part->offset, end - begin});
  }
}

}  // namespace pycomm::schedule

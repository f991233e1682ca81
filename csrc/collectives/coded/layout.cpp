#include "collectives/coded/layout.h"

#include <algorithm>
#include <numeric>

#include "collectives/common/schedule.h"

namespace pycomm::coded {
namespace {

/// Returns the granule at which a piece may be cut; a codec without a granule takes it whole.
size_t granule(const Piece& piece) {
  const size_t own = piece.codec->granule();
  return own == 0 ? std::max<size_t>(1, piece.numel) : std::lcm(own, kGrain);
}

/// Cuts of values as one sequence, whatever lies between them in the bucket.
class Cuts {
 public:
  Cuts(Span<const Piece> pieces, const PieceRuns& values) : values_(values) {
    parts_.reserve(values.size());
    for (const PieceRun& run : values) {
      parts_.push_back({numel_, run.numel, granule(pieces[run.piece])});
      numel_ += run.numel;
    }
  }
  schedule::Range chunk(int owners, int index, const Shares& shares = {}) const {
    return schedule::chunk(parts(), numel_, owners, index, shares);
  }
  template <typename F>
  void for_segments(const schedule::Range& chunk, size_t numel, const F& f) const {
    schedule::for_segments(parts(), chunk, numel, f);
  }
  /// Calls f(run) for the runs of a range, each with its piece.
  template <typename F>
  void for_runs(const schedule::Range& range, const F& f) const {
    schedule::for_runs(parts(), range, [&](const schedule::Run& run) {
      const PieceRun& whole = values_[run.part];
      f(PieceRun{whole.piece, whole.offset + run.offset, run.numel});
    });
  }

 private:
  Span<const schedule::Part> parts() const { return {parts_.data(), parts_.size()}; }

  const PieceRuns& values_;
  std::vector<schedule::Part> parts_;
  size_t numel_ = 0;
};

}  // namespace

PieceRuns values_of(Span<const Piece> pieces) {
  PieceRuns values;
  for (size_t i = 0; i < pieces.size; i++) values.push_back({i, 0, pieces[i].numel});
  return values;
}

PieceRuns share_of(Span<const Piece> pieces, const PieceRuns& values, int owners, int index) {
  const Cuts cuts(pieces, values);
  PieceRuns runs;
  cuts.for_runs(cuts.chunk(owners, index), [&](const PieceRun& run) { runs.push_back(run); });
  return runs;
}

size_t numel_of(Span<const PieceRun> values) {
  size_t numel = 0;
  for (const PieceRun& run : values) numel += run.numel;
  return numel;
}

BucketLayout::BucketLayout(Span<const Piece> pieces, const PieceRuns& values, int owners,
                           size_t segment_numel, const Shares& shares) {
  if (values.empty()) return;
  const size_t chunks = static_cast<size_t>(owners);
  first_.reserve(chunks + 1);
  segments_.reserve(chunks);
  runs_.reserve(values.size() + chunks);
  const Cuts cuts(pieces, values);
  for (int owner = 0; owner < owners; owner++) {
    begin_chunk();
    const schedule::Range chunk = cuts.chunk(owners, owner, shares);
    cuts.for_segments(chunk, segment_numel, [&](const schedule::Range& range) {
      begin_segment(0, 0);
      cuts.for_runs(range, [&](const PieceRun& run) { add(pieces, run); });
    });
  }
  begin_chunk();
}

BucketLayout BucketLayout::of_rows(Span<const Piece> pieces, const std::vector<size_t>& numbers,
                                   size_t segment_numel) {
  const BucketLayout row(pieces, values_of(pieces), 1, segment_numel);
  BucketLayout layout;
  for (size_t owner = 0; owner < numbers.size(); owner++) {
    layout.begin_chunk();
    for (const Segment& segment : row.segments_) {
      layout.begin_segment(owner, numbers[owner]);
      for (const PieceRun& run : row.runs(segment)) layout.add(pieces, run);
    }
  }
  layout.begin_chunk();
  return layout;
}

BucketLayout BucketLayout::of_chunks(Span<const Piece> pieces,
                                     const std::vector<PieceRuns>& chunks) {
  BucketLayout layout;
  for (const PieceRuns& chunk : chunks) {
    layout.begin_chunk();
    if (!chunk.empty()) layout.begin_segment(0, 0);
    for (const PieceRun& run : chunk) layout.add(pieces, run);
  }
  layout.begin_chunk();
  return layout;
}

size_t BucketLayout::most() const {
  size_t most = 0;
  for (int owner = 0; owner < owners(); owner++) most = std::max(most, count(owner));
  return most;
}

size_t BucketLayout::most_bytes() const {
  size_t most = 0;
  for (const Segment& segment : segments_) most = std::max(most, segment.bytes);
  return most;
}

void BucketLayout::add(Span<const Piece> pieces, const PieceRun& run) {
  const Codec& codec = *pieces[run.piece].codec;
  const size_t bytes = codec.encoded_bytes(run.numel);
  Segment& segment = segments_.back();
  segment.variable |= codec.variable();
  segment.bytes += bytes;
  segment.last_run++;
  bytes_ += bytes;
  runs_.push_back(run);
}

}  // namespace pycomm::coded

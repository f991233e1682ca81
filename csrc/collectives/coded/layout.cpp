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
  std::vector<schedule::Range> segments(const schedule::Range& chunk, size_t numel) const {
    return schedule::segments(parts(), chunk, numel);
  }
  PieceRuns runs(const schedule::Range& range) const {
    std::vector<schedule::Run> found;
    schedule::append_runs(parts(), range, found);
    PieceRuns runs;
    runs.reserve(found.size());
    for (const schedule::Run& run : found) {
      const PieceRun& whole = values_[run.part];
      runs.push_back({whole.piece, whole.offset + run.offset, run.numel});
    }
    return runs;
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
  return cuts.runs(cuts.chunk(owners, index));
}

size_t numel_of(Span<const PieceRun> values) {
  size_t numel = 0;
  for (const PieceRun& run : values) numel += run.numel;
  return numel;
}

BucketLayout::BucketLayout(Span<const Piece> pieces, const PieceRuns& values, int owners,
                           size_t segment_numel, const Shares& shares) {
  const Cuts cuts(pieces, values);
  for (int owner = 0; owner < owners; owner++) {
    begin_chunk();
    const schedule::Range chunk = cuts.chunk(owners, owner, shares);
    for (const schedule::Range& range : cuts.segments(chunk, segment_numel)) {
      const PieceRuns runs = cuts.runs(range);
      add(pieces, {runs.data(), runs.size()});
    }
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
      layout.add(pieces, row.runs(segment), owner, numbers[owner]);
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
    if (!chunk.empty()) layout.add(pieces, {chunk.data(), chunk.size()});
  }
  layout.begin_chunk();
  return layout;
}

size_t BucketLayout::most() const {
  size_t most = 0;
  for (int owner = 0; owner < owners(); owner++) most = std::max(most, count(owner));
  return most;
}

void BucketLayout::add(Span<const Piece> pieces, Span<const PieceRun> runs, size_t row,
                       size_t number) {
  Segment segment{runs_.size(), runs_.size() + runs.size, row, number, bytes_, 0, false};
  for (const PieceRun& run : runs) {
    const Codec& codec = *pieces[run.piece].codec;
    segment.bytes += codec.encoded_bytes(run.numel);
    segment.variable |= codec.variable();
  }
  runs_.insert(runs_.end(), runs.begin(), runs.end());
  segments_.push_back(segment);
  bytes_ += segment.bytes;
}

}  // namespace pycomm::coded

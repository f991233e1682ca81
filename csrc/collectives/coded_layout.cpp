#include "collectives/coded_layout.h"

#include <numeric>

#include "collectives/schedule.h"

namespace pycomm::coded {
namespace {

/// Where a piece may be cut; a codec without a granule takes it whole.
size_t granule(const Piece& piece) {
  const size_t own = piece.codec->granule();
  return own == 0 ? std::max<size_t>(1, piece.numel) : std::lcm(own, kGrain);
}

}  // namespace

std::vector<Run> values_of(Span<const Piece> pieces) {
  std::vector<Run> values;
  for (size_t i = 0; i < pieces.size; i++) values.push_back({i, 0, pieces[i].numel});
  return values;
}

Layout::Layout(Span<const Piece> pieces, const std::vector<Run>& values, int owners,
               size_t segment_numel) {
  // One after another, whatever lies between them in the bucket.
  std::vector<schedule::Part> parts;
  parts.reserve(values.size());
  size_t numel = 0;
  for (const Run& run : values) {
    parts.push_back({numel, run.numel, granule(pieces[run.piece])});
    numel += run.numel;
  }
  const Span<const schedule::Part> all(parts.data(), parts.size());
  std::vector<schedule::Run> runs;
  for (int owner = 0; owner < owners; owner++) {
    first_.push_back(segments_.size());
    const schedule::Range chunk = schedule::chunk(all, numel, owners, owner);
    for (const schedule::Range& range : schedule::segments(all, chunk, segment_numel)) {
      runs.clear();
      schedule::append_runs(all, range, runs);
      Segment segment{runs_.size(), runs_.size() + runs.size(), bytes_, 0, false};
      for (const schedule::Run& run : runs) {
        const Run& whole = values[run.part];
        const Codec& codec = *pieces[whole.piece].codec;
        runs_.push_back({whole.piece, whole.offset + run.offset, run.numel});
        segment.bytes += codec.encoded_bytes(run.numel);
        segment.variable |= codec.variable();
      }
      segments_.push_back(segment);
      bytes_ += segment.bytes;
    }
  }
  first_.push_back(segments_.size());
}

}  // namespace pycomm::coded

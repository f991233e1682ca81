// Layout of the values of a coded operation: a chunk for each owner, segments of a chunk, runs of a
// segment. It is equal on all ranks.
#pragma once
#include "collectives/common/options.h"
#include "collectives/common/shares.h"

namespace pycomm::coded {

/// Pieces are cut only at multiples of this many values, and of their codec's granule: stored
/// residuals may have blocks of their own.
constexpr size_t kGrain = 32;

/// Consecutive values of one piece.
struct PieceRun {
  size_t piece = 0;
  size_t offset = 0;  ///< in the piece
  size_t numel = 0;
};

/// Part of one chunk that travels at once: the payloads of its runs, one after the other.
struct Segment {
  size_t first_run, last_run;
  size_t payload;  ///< place among all payloads of the layout
  size_t bytes;    ///< the most, if variable
  bool variable;   ///< one of its codecs is
};

class BucketLayout {
 public:
  /// Divides `values` among `owners`.
  BucketLayout(Span<const Piece> pieces, const std::vector<PieceRun>& values, int owners,
               size_t segment_numel, const Shares& shares = {});

  size_t count(int owner) const { return first_[owner + 1] - first_[owner]; }
  const Segment& at(int owner, size_t s) const { return segments_[first_[owner] + s]; }
  Span<const PieceRun> runs(const Segment& segment) const {
    return {runs_.data() + segment.first_run, segment.last_run - segment.first_run};
  }
  /// Bytes of all payloads, and of those of one owner's chunk.
  size_t bytes() const { return bytes_; }
  size_t bytes(int owner) const { return place(first_[owner + 1]) - place(first_[owner]); }

 private:
  size_t place(size_t s) const { return s < segments_.size() ? segments_[s].payload : bytes_; }

  std::vector<PieceRun> runs_;
  std::vector<Segment> segments_;
  std::vector<size_t> first_;  // per owner, and the end
  size_t bytes_ = 0;
};

/// Returns the whole pieces.
std::vector<PieceRun> values_of(Span<const Piece> pieces);
/// Returns chunk `index` of values divided among `owners`.
std::vector<PieceRun> share_of(Span<const Piece> pieces, const std::vector<PieceRun>& values,
                               int owners, int index);
size_t numel_of(const std::vector<PieceRun>& values);

}  // namespace pycomm::coded

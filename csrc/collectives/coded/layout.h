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
using PieceRuns = std::vector<PieceRun>;

/// Part of one chunk that travels at once: the payloads of its runs, one after the other.
struct Segment {
  size_t first_run, last_run;
  size_t row;      ///< of the values, where each owner has a row of its own; else 0
  size_t number;   ///< of that row, in residuals and random numbers
  size_t payload;  ///< place among all payloads of the layout
  size_t bytes;    ///< the most, if variable
  bool variable;   ///< one of its codecs is
};

class PYCOMM_API BucketLayout {
 public:
  /// No chunks.
  BucketLayout() = default;
  /// Divides `values` among `owners`. Each segment has about `segment_numel` values.
  BucketLayout(Span<const Piece> pieces, const PieceRuns& values, int owners, size_t segment_numel,
               const Shares& shares = {});
  /// Gives each owner all pieces of its own row. Rows have these numbers.
  static BucketLayout of_rows(Span<const Piece> pieces, const std::vector<size_t>& numbers,
                              size_t segment_numel);
  /// Gives each owner one of the chunks, in one segment.
  static BucketLayout of_chunks(Span<const Piece> pieces, const std::vector<PieceRuns>& chunks);

  bool empty() const { return segments_.empty(); }
  size_t count(int owner) const { return owners() == 0 ? 0 : first_[owner + 1] - first_[owner]; }
  /// The most segments of a chunk.
  size_t most() const;
  const Segment& at(int owner, size_t s) const { return segments_[first_[owner] + s]; }
  Span<const PieceRun> runs(const Segment& segment) const {
    return {runs_.data() + segment.first_run, segment.last_run - segment.first_run};
  }
  Span<const Segment> segments() const { return {segments_.data(), segments_.size()}; }
  /// The most bytes of a segment.
  size_t most_bytes() const;
  /// Bytes of all payloads, and of those of one owner's chunk.
  size_t bytes() const { return bytes_; }
  size_t bytes(int owner) const {
    return owners() == 0 ? 0 : place(first_[owner + 1]) - place(first_[owner]);
  }
  /// Place of a segment's payload among those of its chunk.
  size_t in_chunk(int owner, size_t s) const { return at(owner, s).payload - place(first_[owner]); }

 private:
  int owners() const { return first_.empty() ? 0 : static_cast<int>(first_.size()) - 1; }
  size_t place(size_t s) const { return s < segments_.size() ? segments_[s].payload : bytes_; }
  void begin_chunk() { first_.push_back(segments_.size()); }
  void begin_segment(size_t row, size_t number) {
    segments_.push_back({runs_.size(), runs_.size(), row, number, bytes_, 0, false});
  }
  /// Adds a run to the last segment.
  void add(Span<const Piece> pieces, const PieceRun& run);

  PieceRuns runs_;
  std::vector<Segment> segments_;
  std::vector<size_t> first_;  // per owner, and the end
  size_t bytes_ = 0;
};

/// Returns the values of a row of the pieces.
inline size_t row_numel(Span<const Piece> pieces) {
  return pieces.size == 0 ? 0 : pieces.end()[-1].offset + pieces.end()[-1].numel;
}
/// Returns the whole pieces.
PieceRuns values_of(Span<const Piece> pieces);
/// Returns chunk `index` of values divided among `owners`.
PieceRuns share_of(Span<const Piece> pieces, const PieceRuns& values, int owners, int index);
size_t numel_of(Span<const PieceRun> values);

}  // namespace pycomm::coded

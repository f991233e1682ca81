// How the values of a coded operation are cut: a chunk for each owner, segments of a chunk, runs of
// a segment. Equal on all ranks.
#pragma once
#include "collectives/communicator.h"

namespace pycomm::coded {

/// Pieces are cut only at multiples of this many values, and of their codec's granule: stored
/// residuals may have blocks of their own.
constexpr size_t kGrain = 32;

/// Consecutive values of one piece.
struct Run {
  size_t piece = 0;
  size_t offset = 0;  ///< in the piece
  size_t numel = 0;
};

/// What travels at once of one chunk: the payloads of its runs, one behind the other.
struct Segment {
  size_t first_run, last_run;
  size_t payload;  ///< place among all payloads of the layout
  size_t bytes;    ///< the most, if variable
  bool variable;   ///< a codec of it is
};

class Layout {
 public:
  /// Deals `values` out to `owners`, about as many to each.
  Layout(Span<const Piece> pieces, const std::vector<Run>& values, int owners,
         size_t segment_numel);

  size_t count(int owner) const { return first_[owner + 1] - first_[owner]; }
  const Segment& at(int owner, size_t s) const { return segments_[first_[owner] + s]; }
  Span<const Run> runs(const Segment& segment) const {
    return {runs_.data() + segment.first_run, segment.last_run - segment.first_run};
  }
  /// Of all payloads, and of those of one owner's chunk.
  size_t bytes() const { return bytes_; }
  size_t bytes(int owner) const { return place(first_[owner + 1]) - place(first_[owner]); }

 private:
  size_t place(size_t s) const { return s < segments_.size() ? segments_[s].payload : bytes_; }

  std::vector<Run> runs_;
  std::vector<Segment> segments_;
  std::vector<size_t> first_;  // per owner, and the end
  size_t bytes_ = 0;
};

/// The pieces, whole.
std::vector<Run> values_of(Span<const Piece> pieces);
/// Chunk `index` of values dealt out to `owners`.
std::vector<Run> share_of(Span<const Piece> pieces, const std::vector<Run>& values, int owners,
                          int index);
size_t numel_of(const std::vector<Run>& values);

}  // namespace pycomm::coded

// Pieces of a bucket, and both sides of their feedback.
#pragma once
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "collectives/common/options.h"
#include "core/error.h"

namespace pycomm {

/// The side that a step reads, and the one that it writes, so that the step can be taken back. They
/// are the same where a step works in place.
using Sides = std::pair<size_t, size_t>;

/// The two sides of a feedback memory; null: there is none. Each has the values of its span.
struct TwoSides {
  std::array<uint8_t*, 2> at = {};
  feedback::Spans spans = feedback::kAllValues;

  feedback::Memory of(const Sides& sides) const {
    const auto [old, fresh] = sides;
    const auto [begin, end] = feedback::shared_span(spans, old, fresh);
    return {at[old], at[fresh], begin, end};
  }
};

/// The pieces of a bucket. Made once, used in every step; codecs and memory belong to who adds
/// them.
class BucketPieces {
 public:
  /// Residuals of workers have `rows`: one for each rank in a reduce_scatter.
  explicit BucketPieces(size_t rows) : rows_(rows) {
    if (rows == 0) throw Error("the bucket has 0 rows; give at least 1");
  }

  /// Adds a piece behind those before it.
  void add(size_t numel, const Codec* codec, uint32_t tensor, const feedback::Feedback& how,
           const TwoSides& worker, const TwoSides& owner, const TwoSides& momentum) {
    check_room(numel);
    Piece piece;
    piece.offset = numel_;
    piece.numel = numel;
    piece.codec = codec;
    piece.tensor = tensor;
    piece.worker = how;
    piece.owner.storage = how.storage;
    memories_.push_back({worker, owner, momentum});
    // Sides with the values of other spans are set in each step.
    const bool alike = worker.spans[0] == worker.spans[1] && owner.spans[0] == owner.spans[1];
    set_memory(piece, memories_.back(), {0, alike ? 1 : 0});
    pieces_.push_back(piece);
    numel_ += numel;
  }

  /// Returns the pieces of a step; `sides` has one entry for each.
  std::vector<Piece> of(const std::vector<Sides>& sides) const {
    if (sides.size() != size()) {
      throw Error("sides are given for " + std::to_string(sides.size()) +
                  " pieces, but the bucket has " + std::to_string(size()));
    }
    std::vector<Piece> pieces = pieces_;
    for (size_t i = 0; i < sides.size(); i++) {
      const auto [old, fresh] = sides[i];
      if (old > 1 || fresh > 1) {
        throw Error("sides must be 0 or 1, got " + std::to_string(old) + " and " +
                    std::to_string(fresh));
      }
      set_memory(pieces[i], memories_[i], sides[i]);
    }
    return pieces;
  }
  /// Sets the sides that pieces() has; until then it writes the second of each memory.
  void set_sides(const std::vector<Sides>& sides) { pieces_ = of(sides); }
  Span<const Piece> pieces() const { return {pieces_.data(), pieces_.size()}; }

  size_t rows() const { return rows_; }
  size_t size() const { return pieces_.size(); }
  size_t numel() const { return numel_; }

 protected:
  /// Throws Error if residuals of so many more values, with at most the bytes of float32, wrap.
  void check_room(size_t numel) const {
    if (numel <= kLargestBuffer / sizeof(float) / rows_ - numel_) return;
    throw Error("no memory holds pieces of " + std::to_string(numel) + " elements and " +
                std::to_string(numel_) + " before them");
  }

 private:
  using Memories = std::array<TwoSides, 3>;  // worker, owner, momentum

  static void set_memory(Piece& piece, const Memories& memories, const Sides& sides) {
    piece.worker.error = memories[0].of(sides);
    piece.owner.error = memories[1].of(sides);
    piece.worker.momentum = memories[2].of(sides);
  }

  const size_t rows_;
  std::vector<Piece> pieces_;
  std::vector<Memories> memories_;
  size_t numel_ = 0;
};

}  // namespace pycomm

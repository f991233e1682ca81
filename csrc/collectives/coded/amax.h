// Amax that ranks share before they encode (Codec::needs_amax): the base of a shared scale.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/coded/layout.h"

namespace pycomm::coded {

/// One number for each granule of the values whose codec requests it.
class Amax {
 public:
  /// Rows are copies of `values` with contents of their own, one bucket after the other.
  Amax(const CodedArgs& args, const std::vector<PieceRun>& values, size_t row_numel,
       size_t rows = 1);

  /// Computes it and takes the largest over all ranks of `context`, with messages of its own; uses
  /// the context's scratch.
  void all_reduce(CollectiveContext& context);
  /// First half of all_reduce(), on a stream. Values of 16 bits become float32 in `room`, of kSlice
  /// values; on the CPU in `scratch`, if `room` is null.
  void compute_amax(Stream stream, feedback::Scratch& scratch, float* room = nullptr);
  static constexpr size_t kSlice = 1 << 16;
  /// Number of all the numbers; they may be put elsewhere, where a stream reaches them.
  size_t count() const { return each_ * rows_; }
  float* numbers() const { return place_; }
  void put(float* numbers) { place_ = numbers; }
  /// Returns the numbers of a run of these values; null if its codec requests none.
  const float* of(const PieceRun& run, size_t row) const;

 private:
  void compute_amax(const PieceRun& run, size_t row, Stream stream, feedback::Scratch& scratch,
                    float* room);

  const CodedArgs& args_;
  const std::vector<PieceRun>& values_;
  size_t row_numel_, rows_;
  std::vector<ptrdiff_t> first_;  // per piece: place of its granule 0 in a row
  size_t each_ = 0;               // numbers of a row
  std::vector<float> numbers_;
  float* place_ = nullptr;
};

}  // namespace pycomm::coded

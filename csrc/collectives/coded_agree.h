// Numbers on which ranks agree before they encode (Codec::agrees), such as a shared scale.
#pragma once
#include "collectives/coded_layout.h"
#include "collectives/exchange.h"

namespace pycomm::coded {

/// One number for each granule of the values whose codec asks for it.
class Agreed {
 public:
  /// Rows are copies of `values` with contents of their own, one bucket behind the other.
  Agreed(const CodedArgs& args, const std::vector<Run>& values, size_t row_numel, size_t rows = 1);

  /// Measures and takes the largest over all ranks of `ex`, with messages of its own; uses the
  /// exchange's scratch.
  void agree(Exchange& ex);
  /// The first half of it, on a stream. Values of 16 bits become float32 in `room`, of kSlice
  /// values; on the CPU in `scratch`, if that is null.
  void measure(Stream stream, feedback::Scratch& scratch, float* room = nullptr);
  static constexpr size_t kSlice = 1 << 16;
  /// All the numbers; they may be put elsewhere, where a stream reaches them.
  size_t count() const { return each_ * rows_; }
  float* numbers() const { return place_; }
  void put(float* numbers) { place_ = numbers; }
  /// The numbers of a run of these values; null if its codec does not ask.
  const float* of(const Run& run, size_t row) const;

 private:
  void measure(const Run& run, size_t row, Stream stream, feedback::Scratch& scratch, float* room);

  const CodedArgs& args_;
  const std::vector<Run>& values_;
  size_t row_numel_, rows_;
  std::vector<ptrdiff_t> first_;  // per piece: place of its granule 0 in a row
  size_t each_ = 0;               // numbers of a row
  std::vector<float> numbers_;
  float* place_ = nullptr;
};

}  // namespace pycomm::coded

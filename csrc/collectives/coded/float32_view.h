// Float32View: the values of a coded operation as float32. Float32 values are encoded and decoded
// in place. Values of 16 bits are widened run by run into memory that stays in the cache, and what
// is decoded there is averaged and narrowed in one pass, so there is no float32 copy of a bucket.
#pragma once
#include "collectives/coded/coder.h"

namespace pycomm::coded {

class Float32View {
 public:
  /// `values` are laid out as the pieces say, with the dtype of args.data. Averages are over
  /// `divisor` ranks. `found_inf` becomes 1 where finish() sees Inf or NaN. On a GPU 16-bit values
  /// need `room` for the float32 of a segment; the CPU takes it from `scratch`.
  Float32View(const CodedArgs& args, const void* values, int divisor, feedback::Scratch& scratch,
              float* found_inf, Stream stream = {}, float* room = nullptr);

  /// Returns the values of runs, to be encoded before the next call.
  Floats read(Span<const PieceRun> runs) const;
  /// Returns memory into which the runs can be decoded before the next call; its contents are
  /// undefined.
  Floats room(Span<const PieceRun> runs) const;
  /// Divides a sum that is encoded next, if averaging is requested.
  void average(Span<const PieceRun> runs, Floats sum) const;
  /// Completes a sum in memory from room(): divides it likewise, and stores it in its place.
  void finish_sum(Span<const PieceRun> runs, Floats sum) const { finish(runs, sum, divisor_); }
  /// Completes values that others have averaged.
  void finish_result(Span<const PieceRun> runs, Floats values) const { finish(runs, values, 1.0f); }

 private:
  bool is_wide() const { return args_.data.dtype == DType::float32; }
  float* packed(Span<const PieceRun> runs) const;
  void finish(Span<const PieceRun> runs, Floats values, float divisor) const;
  uint8_t* place(const PieceRun& run) const;

  const CodedArgs& args_;
  uint8_t* const values_;
  const float divisor_;  // 1: no averaging
  feedback::Scratch& scratch_;
  float* const found_inf_;
  const Stream stream_;
  float* const room_;
};

}  // namespace pycomm::coded

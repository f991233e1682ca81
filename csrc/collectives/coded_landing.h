// Where a coded operation has its values as float32. Float32 values are encoded and decoded where
// they lie. Values of 16 bits are widened run by run into memory that stays in the cache, and what
// is decoded there is averaged and narrowed in one pass, so there is no float32 copy of a bucket.
#pragma once
#include "collectives/coded_coder.h"

namespace pycomm::coded {

class Landing {
 public:
  /// `values` are laid out as the pieces say, with the dtype of args.data. Averages are over
  /// `divisor` ranks. `found_inf` becomes 1 where finish() sees Inf or NaN. On a GPU 16-bit values
  /// need `room` for the float32 of a segment; the CPU takes it from `scratch`.
  Landing(const CodedArgs& args, const void* values, int divisor, feedback::Scratch& scratch,
          float* found_inf, Stream stream = {}, float* room = nullptr);

  /// The values of runs, to be encoded before the next call.
  Floats read(Span<const Run> runs) const;
  /// Where the runs can be decoded, before the next call; contents mean nothing.
  Floats room(Span<const Run> runs) const;
  /// If asked to average: divides values whose codec's combine choose() picks.
  void average(Span<const Run> runs, Floats values, bool (*choose)(Combine)) const;
  /// Ends what room() gave: averages likewise, adds what EF21 keeps of the steps before, and puts
  /// it where it belongs.
  void finish(Span<const Run> runs, Floats values, bool (*choose)(Combine)) const;

 private:
  bool is_wide() const { return args_.data.dtype == DType::float32; }
  float* packed(Span<const Run> runs) const;
  ConvertArgs conversion(const Run& run, bool (*choose)(Combine)) const;
  uint8_t* place(const Run& run) const;

  const CodedArgs& args_;
  uint8_t* const values_;
  const int divisor_;
  feedback::Scratch& scratch_;
  float* const found_inf_;
  const Stream stream_;
  float* const room_;
};

// Which codecs' values are divided at a place.
inline bool all(Combine) { return true; }
inline bool none(Combine) { return false; }
inline bool recoded(Combine combine) { return combine == Combine::recode; }
inline bool undivided(Combine combine) { return combine != Combine::recode; }

}  // namespace pycomm::coded

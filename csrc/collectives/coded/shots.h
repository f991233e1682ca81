// Shots: the steps of one rank in a coded operation whose payloads its caller moves, as the hooks
// do on process groups of other backends. Runs, random numbers, residuals and the order of sums are
// those of coded.h.
//
// On a GPU each run is a row of launches (codecs/base/launch.h), with its own part of the stream's
// scratch memory, so that the same kernel of all runs is one launch. The host cannot read payloads
// there, so each has its largest size.
#pragma once
#include <optional>

#include "codecs/base/launch.h"
#include "collectives/coded/coder.h"

namespace pycomm::coded {

/// Throws Error unless each run lies in its piece and is cut where codecs and residuals allow it.
PYCOMM_API void check_runs(Span<const Piece> pieces, Span<const PieceRun> runs);

/// One call of the caller. Runs are coded as a whole, so their payloads do not depend on memory.
class PYCOMM_API Shots {
 public:
  /// `args.data` has `rows` rows of the pieces; each function says which values those are. `rank`
  /// is ours among those that encode the same values. Where args.average is set, sums are divided
  /// by `divisor`. On a GPU the stream needs scratch memory for at least one run, and `found_inf`,
  /// in its memory, becomes 1 where finite() is false. `swapped`, likewise: see
  /// codecs/base/batch.h.
  Shots(const CodedArgs& args, size_t rows, int rank, int divisor, Stream stream = {},
        float* found_inf = nullptr, const float* swapped = nullptr);
  Shots(const Shots&) = delete;

  /// Returns the bytes of a GPU's scratch memory for a run.
  static size_t scratch_bytes(const Piece& piece, size_t numel, DType dtype);

  /// Encodes a row as a contribution. Returns the bytes of the payloads.
  size_t contribute(Span<const PieceRun> runs, size_t row, uint8_t* out);

  // Payloads come from rank 0, 1, .. in this order. A variable one needs memory after it for its
  // largest size. These functions throw WireMismatch if a payload's own size cannot be true.

  /// Adds up contributions, averages them, and encodes the result as its owner. Overwrites the
  /// values. Returns the bytes of the payloads.
  size_t own(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads,
             uint8_t* out);
  /// Adds up contributions to the result.
  void add_up(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads);
  /// Decodes what rank `sender` has encoded into a row of the result.
  void land(Span<const PieceRun> runs, size_t row, Span<const uint8_t> payload, int sender);
  /// Starts the kernels of a GPU, which the functions above only list.
  void start();
  /// True if the results of add_up() and land() are finite everywhere; of the CPU.
  bool finite() const { return found_inf_ == 0.0f; }

 private:
  const void* row(size_t row) const { return args_.data.at(row * row_numel_); }
  bool on_gpu() const { return stream_.device != Device::cpu; }
  /// Calls do_part(runs, coder, view) for one group of runs after the other, of the values of a
  /// row; a run is never cut.
  template <typename F>
  void in_parts(Span<const PieceRun> runs, size_t row, float* found_inf, const F& do_part);

  const CodedArgs& args_;
  const size_t row_numel_;
  const int rank_, divisor_;
  const Stream stream_;
  feedback::Scratch scratch_;
  float found_inf_ = 0.0f;
  float* const found_inf_at_;
  std::optional<codecs::Batching> batching_;
  size_t scratch_used_ = 0;
};

}  // namespace pycomm::coded

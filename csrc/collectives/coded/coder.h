// Coder: what one rank computes in a coded operation, whoever moves the payloads
// (coded/exchange.h). Runs, random numbers, residuals and the order of sums are those of coded.h.
//
// Float32 values are encoded and decoded in place. Values of 16 bits are widened part by part into
// memory that stays in the cache, and what is decoded there is averaged and narrowed in one pass,
// so there is no float32 copy of a bucket.
//
// On a GPU each run is a row of launches (codecs/base/launch.h), with its own part of the stream's
// scratch memory, so that the same kernel of all runs is one launch. The host cannot read payloads
// there, so each has its largest size.
#pragma once
#include <optional>

#include "codecs/base/launch.h"
#include "codecs/convert.h"
#include "collectives/coded/exchange.h"
#include "core/op_timing.h"

namespace pycomm::coded {

/// The two places where values are encoded.
enum class Hop : uint8_t {
  worker,  ///< what a rank contributes
  owner,   ///< what an owner sends back
};

struct CoderOptions {
  int rank = 0;     ///< ours among those that encode the same values
  int divisor = 1;  ///< of sums, where args.average is set
  Stream stream = {};
  /// Becomes 1 where the result is not finite, in memory of the stream's device; null: finite()
  /// tells, of the CPU.
  float* found_inf = nullptr;
  const float* swapped = nullptr;  ///< on a GPU: see codecs/base/batch.h
  OpTiming* timing = nullptr;      ///< gets the time that the host codes; null: nobody asks
  /// Each payload has its largest size, as on a GPU: none may be read for its size.
  bool fixed = false;
};

/// Throws Error unless each run lies in its piece and is cut where codecs and residuals allow it.
PYCOMM_API void check_runs(Span<const Piece> pieces, Span<const PieceRun> runs);

class PYCOMM_API Coder {
 public:
  /// `args.data` and `out` have one or more rows of the pieces; each function says which it reads
  /// and writes. Where pieces have several rows of contributions (reduce_scatter: one for each
  /// owner), residuals have as many, and each row has random numbers of its own. On a GPU the
  /// stream needs scratch memory for at least one run.
  Coder(const CodedArgs& args, void* out, feedback::Scratch& scratch, const CoderOptions& options);
  Coder(const Coder&) = delete;

  /// Returns the bytes of a GPU's scratch memory for all runs of a plan, so that they share their
  /// launches, but not more than a bound if the largest run needs less.
  static size_t scratch_bytes(const CodedArgs& args, const Plan& plan);

  /// Encodes runs of a row of the input as a contribution, with the residual and random numbers of
  /// row `number`. Returns the bytes of the payloads.
  size_t contribute(Span<const PieceRun> runs, size_t row, size_t number, uint8_t* out);

  // Payloads are those of rank 0, 1, .. in this order, and lose what is read. These functions write
  // to the output, and throw WireMismatch if a payload's own size cannot be true.

  /// Adds up contributions, averages them, and encodes the result as its owner. Overwrites the
  /// values. Returns the bytes of the payloads; their memory is none from which is read.
  size_t own(Span<const PieceRun> runs, std::vector<Received>& payloads, uint8_t* out);
  /// Adds up contributions to the result.
  void add_up(Span<const PieceRun> runs, std::vector<Received>& payloads);
  /// Decodes what one rank has encoded into a row of the result.
  void land(Span<const PieceRun> runs, size_t row, Received payload);
  /// Starts the kernels of a GPU, which the functions above only list.
  void start();
  /// True if the results of add_up() and land() are finite everywhere; of the CPU, where no
  /// found_inf is given.
  bool finite() const { return found_inf_ == 0.0f; }

 private:
  /// Runs that are processed at once.
  struct Part {
    Span<const PieceRun> runs;
    Stream stream;
    float* floats;  ///< memory for values of 16 bits; null: from scratch_
  };
  /// Float32 values of a part.
  struct Floats {
    float* data;
    bool packed;  ///< one run after the other; else each at its place in the bucket
  };

  bool on_gpu() const { return options_.stream.device != Device::cpu; }
  /// Returns true if a payload of a codec takes only the bytes that it states.
  bool is_close(const Codec& codec) const {
    return codec.variable() && !on_gpu() && !options_.fixed;
  }
  /// Calls do_part(part) for one after the other; a run is never cut.
  template <typename F>
  void in_parts(Span<const PieceRun> runs, const F& do_part);
  /// Calls do_run(piece, run, its float32 values) for each run of a part.
  template <typename F>
  void for_runs(const Part& part, const Floats& values, const F& do_run) const;

  RandomKey key(Hop hop, const Piece& piece, size_t row) const;
  uint8_t* row_at(void* values, size_t row) const {
    return static_cast<uint8_t*>(values) + row * row_bytes_;
  }
  uint8_t* place(uint8_t* row, const Piece& piece, const PieceRun& run) const {
    return row + (piece.offset + run.offset) * size_of(args_.data.dtype);
  }
  /// Returns memory for the float32 of a part of a row: its own where it is float32. Its contents
  /// are undefined, or what was decoded there.
  Floats room(const Part& part, uint8_t* row) const;
  size_t encode(Hop hop, const Part& part, const Floats& values, uint8_t* out, size_t row,
                const Contributions& sum = {}) const;
  /// Decodes, overwriting or adding, and takes the payloads from `payload`.
  void decode(const Part& part, Received& payload, const Floats& values, bool add) const;
  void add_payloads(const Part& part, std::vector<Received>& payloads, const Floats& sum) const;
  void average(const Part& part, const Floats& sum) const;
  /// Divides values, stores them in their row, and looks for Inf and NaN.
  void finish(const Part& part, const Floats& values, uint8_t* row, float divisor);

  const CodedArgs& args_;
  void* const out_;
  feedback::Scratch& scratch_;
  const CoderOptions options_;
  const float divisor_;  // 1: no averaging
  const size_t row_bytes_;
  float found_inf_ = 0.0f;
  float* const found_inf_at_;
  std::optional<codecs::Batching> batching_;  // of the launches since start()
  size_t scratch_used_ = 0;
};

}  // namespace pycomm::coded

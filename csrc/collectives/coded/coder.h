// Coder: encodes and decodes the runs of a coded operation, with their random numbers and
// residuals.
#pragma once
#include "codecs/convert.h"
#include "collectives/coded/layout.h"
#include "core/op_timing.h"

namespace pycomm::coded {

/// The two places where values are encoded.
enum class Hop : uint8_t {
  worker,  ///< what a rank contributes
  owner,   ///< what an owner sends back
};

/// Float32 values of runs.
struct Floats {
  float* data;
  bool packed;  ///< one run after the other; else each at data + piece.offset + run.offset

  /// Returns the values of one run; `next`, at first `data`, advances to the run after it.
  float* of(const Piece& piece, const PieceRun& run, float*& next) const {
    if (!packed) return data + piece.offset + run.offset;
    next += run.numel;
    return next - run.numel;
  }
};

/// Place of values in their piece.
struct Place {
  size_t row, offset;
};

/// Layout of the payloads of several runs.
enum class Packing : uint8_t {
  close,  ///< one after the other; a variable() one takes the bytes that it uses
  fixed,  ///< each after the largest sizes of those before; for memory that the host cannot read
};

/// Encodes values of a piece with its feedback. `args` lacks only the residuals. Returns how many
/// bytes of args.out are used.
size_t encode_piece(const Piece& piece, Hop hop, const Place& at, const EncodeArgs& args,
                    Packing packing, feedback::Scratch& scratch);

/// Coder of one rank of an operation. Where pieces have several rows (reduce_scatter: one for each
/// owner), residuals have as many, and each row has random numbers of its own.
class Coder {
 public:
  /// `rank` is ours among those that encode the same values. `timing` gets the time that it takes;
  /// null where that is not the host's.
  Coder(const CodedArgs& args, int rank, feedback::Scratch& scratch, Stream stream = {},
        Packing packing = Packing::close, OpTiming* timing = nullptr)
      : args_(args),
        rank_(rank),
        scratch_(scratch),
        stream_(stream),
        packing_(packing),
        timing_(timing) {}

  /// Returns the bytes of all payloads. The input of a run can be contributions in place of values,
  /// for codecs that take them.
  size_t encode(Hop hop, Span<const PieceRun> runs, Floats values, uint8_t* out, size_t row = 0,
                const Contributions& sum = {}) const;
  /// Decodes, overwriting or adding. Returns the bytes of the payloads, after which others may
  /// follow. Throws WireMismatch if they are not what `sender` may send.
  size_t decode(Span<const PieceRun> runs, Span<const uint8_t> payload, Floats values, bool add,
                int sender) const;

 private:
  /// Adds its lifetime to the coding time, if the caller wants to know it.
  class Timed {
   public:
    explicit Timed(OpTiming* timing) : timing_(timing), since_(timing ? ticks() : 0) {}
    ~Timed() {
      if (timing_) timing_->coded += ticks() - since_;
    }
    Timed(const Timed&) = delete;

   private:
    OpTiming* timing_;
    uint64_t since_;
  };

  RandomKey key(Hop hop, const Piece& piece, size_t row) const;

  const CodedArgs& args_;
  int rank_;
  feedback::Scratch& scratch_;
  Stream stream_;
  Packing packing_;
  OpTiming* timing_;
};

}  // namespace pycomm::coded

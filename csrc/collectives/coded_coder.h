// Encodes and decodes the runs of a coded operation: with which random numbers, which residual and
// which agreed numbers.
#pragma once
#include "codecs/convert.h"
#include "collectives/coded_layout.h"
#include "core/spent.h"

namespace pycomm::coded {

class Agreed;  // coded_agree.h

/// The two places where values are encoded.
enum class Hop : uint8_t {
  worker,  ///< what a rank contributes
  owner,   ///< what an owner sends back
};

/// The float32 values of runs.
struct Floats {
  float* data;
  bool packed;  ///< one run behind the other; else each at data + piece.offset + run.offset

  /// Of one run; `next`, at first `data`, goes on to the one behind it.
  float* of(const Piece& piece, const Run& run, float*& next) const {
    if (!packed) return data + piece.offset + run.offset;
    next += run.numel;
    return next - run.numel;
  }
};

/// Granules of a tensor of `numel` values; one if it cannot be cut.
size_t granules(const Codec& codec, size_t numel);

/// Where values stand in their piece.
struct Place {
  size_t row, offset;
};

/// How the payloads of several runs lie.
enum class Packing : uint8_t {
  close,  ///< one behind the other: of one that is variable() what it uses
  fixed,  ///< each where the most that the ones before can be ends; where the host cannot look
};

// Everything that feeds back goes through these two.

/// Encodes values of a piece. `args` lacks only the residuals. Returns how many bytes of args.out
/// are used.
size_t encode_piece(const Piece& piece, Hop hop, const Place& at, const EncodeArgs& args,
                    Packing packing, feedback::Scratch& scratch);
/// Codec::measure of values of a piece.
void measure_piece(const Piece& piece, Hop hop, const Place& at, Span<const float> in, float* out,
                   Stream stream, feedback::Scratch& scratch);

/// What one rank of an operation does to values. Where pieces have several rows (reduce_scatter:
/// one for each owner), residuals have as many, and each row has random numbers of its own.
class Coder {
 public:
  /// `rank` of `ranks` encode the same values. `agreed` null: each is alone with its values.
  /// `spent` gets the time that it takes; null where that is not the host's.
  Coder(const CodedArgs& args, const Agreed* agreed, int rank, int ranks,
        feedback::Scratch& scratch, Stream stream = {}, Packing packing = Packing::close,
        Spent* spent = nullptr)
      : args_(args),
        agreed_(agreed),
        rank_(rank),
        ranks_(ranks),
        scratch_(scratch),
        stream_(stream),
        packing_(packing),
        spent_(spent) {}

  /// Returns the bytes of all payloads.
  size_t encode(Hop hop, Span<const Run> runs, Floats values, uint8_t* out, size_t row = 0) const;
  /// Overwrites or adds. Throws WireMismatch if the payloads are not what `sender` may send.
  void decode(Span<const Run> runs, Span<const uint8_t> payload, Floats values, bool add,
              int sender) const;

 private:
  /// Adds the time until it goes to what is spent, if somebody wants to know.
  class Timed {
   public:
    explicit Timed(Spent* spent) : spent_(spent), since_(spent ? ticks() : 0) {}
    ~Timed() {
      if (spent_) spent_->coded += ticks() - since_;
    }
    Timed(const Timed&) = delete;

   private:
    Spent* spent_;
    uint64_t since_;
  };

  RandomKey key(Hop hop, const Piece& piece, size_t row) const;

  const CodedArgs& args_;
  const Agreed* agreed_;
  int rank_, ranks_;
  feedback::Scratch& scratch_;
  Stream stream_;
  Packing packing_;
  Spent* spent_;
};

/// Of a float32 result: adds what EF21 keeps of the steps before, and keeps the sum.
void add_means(Span<const Piece> pieces, float* values);

}  // namespace pycomm::coded

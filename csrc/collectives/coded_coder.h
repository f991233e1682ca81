// Encodes and decodes the runs of a coded operation: with which random numbers, which residual and
// which agreed scales.
#pragma once
#include "collectives/coded_layout.h"

namespace pycomm::coded {

/// The two places where values are encoded.
enum class Hop : uint8_t {
  worker,  ///< what a rank contributes
  owner,   ///< what an owner sends back
};

/// Encodes values of a piece that begin `offset` values into its residual. Everything that feeds
/// back goes through here; what it reads and writes of a residual are these values. `args` lacks
/// only the residuals. Returns how many bytes of args.out are used.
size_t encode_piece(const Piece& piece, Hop hop, size_t offset, EncodeArgs args);

/// What a rank of one operation does to values. A run of piece p lies at values + p.offset +
/// run.offset.
class Coder {
 public:
  /// `rank` of `ranks` encode the same values.
  Coder(const CodedArgs& args, int rank, int ranks) : args_(args), rank_(rank), ranks_(ranks) {}

  /// Writes payloads one behind the other; returns their bytes.
  size_t encode(Hop hop, Span<const Run> runs, const float* values, uint8_t* out) const;
  /// Overwrites or adds. Throws WireMismatch if the payloads are not what `sender` may send.
  void decode(Span<const Run> runs, Span<const uint8_t> payload, float* values, bool add,
              int sender) const;

 private:
  RandomKey key(Hop hop, const Piece& piece) const;

  const CodedArgs& args_;
  int rank_, ranks_;
};

}  // namespace pycomm::coded

#include "collectives/coded/coder.h"

#include <cstring>

#include "collectives/coded/coded.h"
#include "core/error.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

/// Returns the size that a payload of a variable codec states.
size_t used_bytes(const uint8_t* payload) {
  uint32_t bytes;
  std::memcpy(&bytes, payload, sizeof bytes);
  return bytes;
}

}  // namespace

size_t encode_piece(const Piece& piece, Hop hop, const Place& at, const EncodeArgs& args,
                    Packing packing, feedback::Scratch& scratch) {
  const feedback::Feedback& feedback = hop == Hop::worker ? piece.worker : piece.owner;
  feedback::encode(*piece.codec, feedback.at(at.row, piece.numel, at.offset), args, scratch);
  const bool close = packing == Packing::close && piece.codec->variable();
  return close ? used_bytes(args.out.data) : args.out.size;
}

RandomKey Coder::key(Hop hop, const Piece& piece, size_t row) const {
  RandomKey key;
  key.step = args_.step;
  key.tensor = piece.tensor;
  key.seed = hop_seed(args_.seed, hop == Hop::worker ? rank_ : kOwnerHop);
  if (row > 0) key.seed = hop_seed(key.seed, static_cast<int>(row));
  return key;
}

size_t Coder::encode(Hop hop, Span<const PieceRun> runs, Floats values, uint8_t* out, size_t row,
                     const Contributions& sum) const {
  const Timed timed(timing_);
  uint8_t* const begin = out;
  float* packed = values.data;
  for (const PieceRun& run : runs) {
    const Piece& piece = args_.pieces[run.piece];
    EncodeArgs args;
    args.in = {values.of(piece, run, packed), run.numel};
    args.out = {out, piece.codec->encoded_bytes(run.numel)};
    args.key = key(hop, piece, row);
    args.index = run.offset;
    args.stream = stream_;
    args.sum = sum;
    out += encode_piece(piece, hop, {row, run.offset}, args, packing_, scratch_);
  }
  return static_cast<size_t>(out - begin);
}

size_t Coder::decode(Span<const PieceRun> runs, Span<const uint8_t> payload, Floats values,
                     bool add, int sender) const {
  const Timed timed(timing_);
  const uint8_t* in = payload.data;
  float* packed = values.data;
  for (const PieceRun& run : runs) {
    const Piece& piece = args_.pieces[run.piece];
    const Codec& codec = *piece.codec;
    const size_t most = codec.encoded_bytes(run.numel), left = payload.data + payload.size - in;
    size_t bytes = most;
    if (packing_ == Packing::close && codec.variable())
      bytes = left < sizeof(uint32_t) ? 0 : used_bytes(in);
    if (bytes > left || bytes > most || bytes % 4 != 0 || (bytes == 0 && most > 0)) {
      throw WireMismatch("rank " + std::to_string(sender) + " sent a payload of " + codec.spec() +
                         " for " + std::to_string(run.numel) +
                         " values whose header says that it has " + std::to_string(bytes) +
                         " bytes, but at most " + std::to_string(std::min(most, left)) +
                         " in a multiple of 4 are possible; install the same pycomm on all hosts");
    }
    // There is memory for the rest after the used bytes: payloads only move together.
    const Span<float> out(values.of(piece, run, packed), run.numel);
    codec.decode({in, most}, out, stream_, add);
    in += bytes;
  }
  return static_cast<size_t>(in - payload.data);
}

}  // namespace pycomm::coded

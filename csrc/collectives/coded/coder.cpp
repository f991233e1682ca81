#include "collectives/coded/coder.h"

#include <cstring>

#include "collectives/coded/amax.h"
#include "collectives/coded/coded.h"
#include "core/error.h"
#include "core/reduce.h"

namespace pycomm::coded {
namespace {

/// Returns the feedback of a hop. A sum that an owner encodes with the codec's own combine must not
/// lose anything, so it has none.
feedback::Feedback feedback_of(const Piece& piece, Hop hop, const Place& at) {
  if (hop == Hop::worker) return piece.worker.at(at.row, piece.numel, at.offset);
  if (piece.codec->combine() == Combine::sum) return {};
  return piece.owner.at(at.row, piece.numel, at.offset);
}

/// Returns the size that a payload of a variable codec states.
size_t used_bytes(const uint8_t* payload) {
  uint32_t bytes;
  std::memcpy(&bytes, payload, sizeof bytes);
  return bytes;
}

}  // namespace

size_t granules(const Codec& codec, size_t numel) {
  const size_t granule = codec.granule();
  if (granule == 0) return numel > 0 ? 1 : 0;
  return numel / granule + (numel % granule != 0);
}

size_t encode_piece(const Piece& piece, Hop hop, const Place& at, const EncodeArgs& args,
                    Packing packing, feedback::Scratch& scratch) {
  feedback::encode(*piece.codec, feedback_of(piece, hop, at), args, scratch);
  const bool close = packing == Packing::close && piece.codec->variable();
  return close ? used_bytes(args.out.data) : args.out.size;
}

void measure_piece(const Piece& piece, Hop hop, const Place& at, Span<const float> in, float* out,
                   Stream stream, feedback::Scratch& scratch) {
  feedback::compute_amax(*piece.codec, feedback_of(piece, hop, at), in,
                         {out, granules(*piece.codec, in.size)}, stream, scratch);
}

RandomKey Coder::key(Hop hop, const Piece& piece, size_t row) const {
  const Codec& codec = *piece.codec;
  RandomKey key;
  key.step = args_.step;
  key.tensor = piece.tensor;
  if (hop == Hop::worker) {
    key.seed = hop_seed(args_.seed, codec.shared_seed() ? kSharedHop : rank_);
    key.rank = static_cast<uint32_t>(rank_);
    key.ranks = static_cast<uint32_t>(ranks_);
  } else if (codec.combine() == Combine::sum) {
    // The key of a contribution; any will do that does not depend on which rank owns a value.
    key.seed = hop_seed(args_.seed, kSharedHop);
    key.ranks = static_cast<uint32_t>(ranks_);
  } else {
    key.seed = hop_seed(args_.seed, kOwnerHop);
  }
  if (row > 0) key.seed = hop_seed(key.seed, static_cast<int>(row));
  return key;
}

size_t Coder::encode(Hop hop, Span<const PieceRun> runs, Floats values, uint8_t* out,
                     size_t row) const {
  const Timed timed(timing_);
  uint8_t* const begin = out;
  float* packed = values.data;
  std::vector<float> measured;
  for (const PieceRun& run : runs) {
    const Piece& piece = args_.pieces[run.piece];
    const Codec& codec = *piece.codec;
    const Place at{row, run.offset};
    EncodeArgs args;
    args.in = {values.of(piece, run, packed), run.numel};
    args.out = {out, codec.encoded_bytes(run.numel)};
    args.key = key(hop, piece, row);
    args.index = run.offset;
    args.stream = stream_;
    args.summed = hop != Hop::worker && codec.combine() == Combine::sum;
    if (codec.needs_amax()) {
      if (amax_ && (hop == Hop::worker || codec.combine() == Combine::sum)) {
        args.amax = amax_->of(run, row);
      } else {  // there is no rank to agree with
        measured.resize(granules(codec, run.numel));
        measure_piece(piece, hop, at, args.in, measured.data(), stream_, scratch_);
        args.amax = measured.data();
      }
    }
    out += encode_piece(piece, hop, at, args, packing_, scratch_);
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
    if (add) {
      codec.decode_add({in, most}, out, stream_);
    } else {
      codec.decode({in, most}, out, stream_);
    }
    in += bytes;
  }
  return static_cast<size_t>(in - payload.data);
}

}  // namespace pycomm::coded

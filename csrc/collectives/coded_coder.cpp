#include "collectives/coded_coder.h"

#include <cstring>

#include "collectives/coded.h"
#include "core/error.h"

namespace pycomm::coded {
namespace {

/// What a payload of a variable codec says of its size.
size_t used_bytes(const uint8_t* payload) {
  uint32_t bytes;
  std::memcpy(&bytes, payload, sizeof bytes);
  return bytes;
}

}  // namespace

size_t encode_piece(const Piece& piece, Hop hop, size_t offset, EncodeArgs args) {
  if (hop == Hop::worker && piece.residual) {
    args.residual = piece.residual + offset;
    args.new_residual = piece.new_residual + offset;
  } else if (hop == Hop::owner && piece.owner_residual && piece.codec->combine() != Combine::sum) {
    args.residual = piece.owner_residual + offset;
    args.new_residual = piece.new_owner_residual + offset;
  }
  piece.codec->encode(args);
  return piece.codec->variable() ? used_bytes(args.out.data) : args.out.size;
}

RandomKey Coder::key(Hop hop, const Piece& piece) const {
  const Codec& codec = *piece.codec;
  RandomKey key;
  key.step = args_.step;
  key.tensor = piece.tensor;
  if (hop == Hop::worker) {
    key.seed = hop_seed(args_.seed, codec.shared_seed() ? kSharedHop : rank_);
    key.rank = static_cast<uint32_t>(rank_);
    key.ranks = static_cast<uint32_t>(ranks_);
  } else if (codec.combine() == Combine::sum) {
    // The contributions' key; of whom does not matter, but must not depend on who owns a value.
    key.seed = hop_seed(args_.seed, kSharedHop);
    key.ranks = static_cast<uint32_t>(ranks_);
  } else {
    key.seed = hop_seed(args_.seed, kOwnerHop);
  }
  return key;
}

size_t Coder::encode(Hop hop, Span<const Run> runs, const float* values, uint8_t* out) const {
  uint8_t* const begin = out;
  for (const Run& run : runs) {
    const Piece& piece = args_.pieces[run.piece];
    EncodeArgs args;
    args.in = {values + piece.offset + run.offset, run.numel};
    args.out = {out, piece.codec->encoded_bytes(run.numel)};
    args.key = key(hop, piece);
    args.index = run.offset;
    out += encode_piece(piece, hop, run.offset, args);
  }
  return static_cast<size_t>(out - begin);
}

void Coder::decode(Span<const Run> runs, Span<const uint8_t> payload, float* values, bool add,
                   int sender) const {
  const uint8_t* in = payload.data;
  const auto left = [&] { return payload.size - static_cast<size_t>(in - payload.data); };
  for (const Run& run : runs) {
    const Piece& piece = args_.pieces[run.piece];
    const Codec& codec = *piece.codec;
    const size_t most = codec.encoded_bytes(run.numel);
    size_t bytes = most;
    if (codec.variable()) bytes = left() < sizeof(uint32_t) ? 0 : used_bytes(in);
    if (bytes > left() || bytes > most || bytes % 4 != 0 || (bytes == 0 && most > 0)) {
      throw WireMismatch("rank " + std::to_string(sender) + " sent a payload of " + codec.spec() +
                         " for " + std::to_string(run.numel) + " values that says it has " +
                         std::to_string(bytes) + " bytes; it may have " +
                         std::to_string(std::min(most, left())));
    }
    const Span<float> out(values + piece.offset + run.offset, run.numel);
    if (add) {
      codec.decode_add({in, most}, out, {});
    } else {
      codec.decode({in, most}, out, {});
    }
    in += bytes;
  }
}

}  // namespace pycomm::coded

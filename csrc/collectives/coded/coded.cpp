// Argument checks of coded operations, and the signature that their ranks agree on.
#include "collectives/coded/coded.h"

namespace pycomm::coded {
namespace {

// FNV-1a (Fowler, Noll, Vo), 64 bits.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
      value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
    }
  }
  void add(uint64_t x) { add(&x, sizeof x); }
  uint32_t value() const { return static_cast<uint32_t>(value_ ^ value_ >> 32); }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace

void check(const char* op, const CodedArgs& args, size_t rows) {
  size_t end = 0;
  const auto fail = [op](size_t piece, const std::string& what) {
    throw Error(std::string(op) + ": piece " + std::to_string(piece) + " " + what);
  };
  for (size_t i = 0; i < args.pieces.size; i++) {
    const Piece& p = args.pieces[i];
    if (p.offset != end) {
      fail(i, "starts at " + std::to_string(p.offset) + ", but the one before it ends at " +
                  std::to_string(end) + "; pieces must follow each other without gaps");
    }
    if (!p.codec) fail(i, "has no codec");
    for (const feedback::Memory& m : {p.worker.error, p.worker.momentum, p.owner.error}) {
      if (!m.old != !m.fresh) {
        fail(i, "has a residual to read but none to write, or the other way round");
      }
    }
    if (p.owner.error && !args.owner_residuals) {
      fail(i, "has a residual of an owner, although no rank is said to have one");
    }
    if (p.numel > args.data.size - end) {  // so no sum wraps
      fail(i, "has " + std::to_string(p.numel) + " elements, but only " +
                  std::to_string(args.data.size - end) + " of " + std::to_string(args.data.size) +
                  " are left");
    }
    end += p.numel;
  }
  const DType dtype = args.data.dtype;
  if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16) {
    throw Error(std::string(op) + ": takes float32, float16 and bfloat16, not " + name(dtype));
  }
  if (args.data.size % rows != 0 || args.data.size / rows != end) {
    throw Error(std::string(op) + ": the pieces cover " + std::to_string(end) + " elements of " +
                (rows > 1 ? std::to_string(rows) + " rows, together " : "") +
                std::to_string(args.data.size));
  }
}

uint32_t signature(const CodedArgs& args) {
  Hash hash;
  const Codec* last = nullptr;
  for (const Piece& p : args.pieces) {
    if (p.codec != last) {
      const std::string spec = p.codec->spec();
      hash.add(spec.data(), spec.size());
      hash.add(static_cast<uint64_t>(p.codec->wire_version()));
      last = p.codec;
    }
    hash.add(p.numel);
    hash.add(p.tensor);
  }
  hash.add(args.average);
  hash.add(args.seed);
  hash.add(args.step);
  if (!args.owner_residuals) hash.add(1);
  const uint32_t value = hash.value();
  return value ? value : 1;
}

std::string label(const CodedArgs& args) {
  const Piece* largest = nullptr;
  for (const Piece& p : args.pieces) {
    if (!largest || p.numel > largest->numel) largest = &p;
  }
  return largest ? largest->codec->spec() : "";
}

uint64_t hop_seed(uint64_t seed, int rank) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(rank + 2);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace pycomm::coded

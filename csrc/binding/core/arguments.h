// Arguments of collectives from Python: addresses, times in seconds, parts, pieces of a bucket.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/core/gil.h"
#include "collectives/communicator.h"
#include "core/deadline.h"
#include "core/error.h"

namespace pycomm {

inline void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
inline float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }
inline uint8_t* bytes(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

/// Converts seconds, rounded up, so that a short limit does not become "none". Throws Error if the
/// time is negative or no number.
inline Milliseconds milliseconds(double seconds) {
  if (!(seconds >= 0)) {  // catches NaN too
    throw Error("the timeout is " + std::to_string(seconds) +
                " seconds; give a number that is not negative, or inf for no limit");
  }
  const double count = std::ceil(seconds * 1e3);
  const auto most = static_cast<double>(kForever.count());
  return count < most ? Milliseconds(static_cast<int64_t>(count)) : kForever;
}

/// Returns the operation of this name.
inline Op op_named(std::string_view text) {
  Op op{};
  while (name(op) != text) {
    if (op == Op::recv) {
      throw Error("unknown op \"" + std::string(text) + "\"; use the name of a collective");
    }
    op = static_cast<Op>(static_cast<uint8_t>(op) + 1);
  }
  return op;
}

/// A list of addresses and sizes in elements: one part per rank.
class PartList {
 public:
  explicit PartList(const std::vector<std::pair<uintptr_t, size_t>>& parts) {
    for (const auto& [address, numel] : parts) {
      inputs_.push_back({pointer(address), numel});
      outputs_.push_back({pointer(address), numel});
    }
  }
  operator ConstParts() const { return inputs_; }
  operator Parts() const { return outputs_; }

 private:
  std::vector<ConstPart> inputs_;
  std::vector<Part> outputs_;
};

/// Returns one side of a collective: an address of `numel` elements, or of a part for each rank; or
/// a list of parts.
template <typename Side>
Side side(pybind11::handle given, size_t numel) {
  if (PyLong_Check(given.ptr()) != 0) return {pointer(given.cast<uintptr_t>()), numel};
  return given.cast<const PartList&>();
}

/// Returns a collective as Python passes it.
inline Collective collective(std::string_view op, pybind11::handle input, pybind11::handle out,
                             size_t numel, DType dtype, ReduceOp redop, int root, double factor) {
  return {op_named(op), dtype, side<ConstParts>(input, numel), side<Parts>(out, numel), redop,
          factor,       root};
}

/// The pieces of a bucket, with their feedback, and the codecs kept alive. Built once, used in
/// every step, by one thread at a time.
class Pieces {
 public:
  /// The two sides of a feedback memory, of which a step reads one and writes one; zeros: there is
  /// none.
  using Addresses = std::array<uintptr_t, 2>;
  /// The side of a piece that a step reads, and the one that it writes.
  using Sides = std::pair<size_t, size_t>;

  /// Residuals of workers have `rows`.
  explicit Pieces(size_t rows = 1) : rows_(rows) {
    if (rows == 0) throw Error("the bucket has 0 rows; give at least 1");
  }

  void add(size_t numel, const pybind11::object& codec, uint32_t tensor, feedback::Kind kind,
           feedback::Storage storage, double decay, Addresses worker, Addresses owner,
           Addresses momentum, const feedback::Spans& worker_spans,
           const feedback::Spans& owner_spans) {
    if (numel > kLargestBuffer / sizeof(float) / rows_ - numel_) {
      throw Error("no memory holds pieces of " + std::to_string(numel) + " elements and " +
                  std::to_string(numel_) + " before them");
    }
    Piece piece;
    piece.offset = numel_;
    piece.numel = numel;
    piece.codec = codec.cast<const Codec*>();
    piece.tensor = tensor;
    piece.worker.kind = kind;
    piece.worker.storage = piece.owner.storage = storage;
    piece.worker.decay = static_cast<float>(decay);
    memories_.push_back({Pair{worker, worker_spans}, Pair{owner, owner_spans},
                         Pair{momentum, feedback::kAllValues}});
    // Sides with the values of other spans are set in each step.
    const bool alike = worker_spans[0] == worker_spans[1] && owner_spans[0] == owner_spans[1];
    set_memory(piece, memories_.back(), 0, alike ? 1 : 0);
    pieces_.push_back(piece);
    codecs_.push_back(codec);
    numel_ += numel;
  }
  /// Sets the sides of each piece; until then the second of each memory is written.
  void set_sides(const std::vector<Sides>& sides) {
    if (sides.size() != pieces_.size()) {
      throw Error("sides are given for " + std::to_string(sides.size()) +
                  " pieces, but the bucket has " + std::to_string(pieces_.size()));
    }
    for (size_t i = 0; i < sides.size(); i++) {
      const auto [old, fresh] = sides[i];
      if (old > 1 || fresh > 1) {
        throw Error("sides must be 0 or 1, got " + std::to_string(old) + " and " +
                    std::to_string(fresh));
      }
      set_memory(pieces_[i], memories_[i], old, fresh);
    }
  }
  Span<const Piece> pieces() const { return {pieces_.data(), pieces_.size()}; }
  size_t rows() const { return rows_; }
  size_t numel() const { return numel_; }
  size_t size() const { return pieces_.size(); }
  /// Returns arguments of an op for the values at an address: `ranks` rows of the pieces, one after
  /// the other, in a reduce_scatter, else one.
  CodedArgs args(Op op, int ranks, uintptr_t data, DType dtype, bool average = false,
                 uint64_t seed = 0, uint32_t step = 0) const {
    const int rows = op == Op::reduce_scatter ? ranks : 1;
    if (numel_ > kLargestBuffer / static_cast<size_t>(rows)) {
      throw Error("no memory holds " + std::to_string(rows) + " rows of " + std::to_string(numel_) +
                  " elements");
    }
    CodedArgs args;
    args.data = {pointer(data), numel_ * static_cast<size_t>(rows), dtype};
    args.pieces = pieces();
    args.average = average && op != Op::all_gather;
    args.seed = seed;
    args.step = step;
    args.owner_residuals = std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
      return static_cast<bool>(piece.owner.error);
    });
    return args;
  }

 private:
  /// Two sides of a residual; each has the values of its span.
  using Pair = std::pair<Addresses, feedback::Spans>;

  static void set_memory(Piece& piece, const std::array<Pair, 3>& memory, size_t old,
                         size_t fresh) {
    const auto of = [&](const Pair& pair) {
      const auto& [at, spans] = pair;
      const auto [begin, end] = feedback::shared_span(spans, old, fresh);
      return feedback::Memory{bytes(at[old]), bytes(at[fresh]), begin, end};
    };
    const auto& [worker, owner, momentum] = memory;
    piece.worker.error = of(worker);
    piece.worker.momentum = of(momentum);
    piece.owner.error = of(owner);
  }

  const size_t rows_;
  std::vector<Piece> pieces_;
  std::vector<std::array<Pair, 3>> memories_;  ///< worker, owner, momentum
  std::vector<pybind11::object> codecs_;
  size_t numel_ = 0;
};

}  // namespace pycomm

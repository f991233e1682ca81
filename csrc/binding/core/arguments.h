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
#include "collectives/common/pieces.h"
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

/// The pieces of a bucket by the addresses of their feedback, and the codecs kept alive. Used by
/// one thread at a time.
class Pieces : public BucketPieces {
 public:
  /// The two sides of a feedback memory; zeros: there is none.
  using Addresses = std::array<uintptr_t, 2>;

  explicit Pieces(size_t rows = 1) : BucketPieces(rows) {}

  void add(size_t numel, const pybind11::object& codec, uint32_t tensor, feedback::Kind kind,
           feedback::Storage storage, double decay, Addresses worker, Addresses owner,
           Addresses momentum, const feedback::Spans& worker_spans,
           const feedback::Spans& owner_spans) {
    const auto sides = [](Addresses at, const feedback::Spans& spans = feedback::kAllValues) {
      return TwoSides{{bytes(at[0]), bytes(at[1])}, spans};
    };
    feedback::Feedback how{kind, storage, static_cast<float>(decay), {}, {}};
    BucketPieces::add(numel, codec.cast<const Codec*>(), tensor, how, sides(worker, worker_spans),
                      sides(owner, owner_spans), sides(momentum));
    codecs_.push_back(codec);
  }
  /// Returns arguments of an op for the values at an address: `ranks` rows of the pieces, one after
  /// the other, in a reduce_scatter, else one.
  CodedArgs args(Op op, int ranks, uintptr_t data, DType dtype, bool average = false,
                 uint64_t seed = 0, uint32_t step = 0) const {
    const int rows = op == Op::reduce_scatter ? ranks : 1;
    if (numel() > kLargestBuffer / static_cast<size_t>(rows)) {
      throw Error("no memory holds " + std::to_string(rows) + " rows of " +
                  std::to_string(numel()) + " elements");
    }
    CodedArgs args;
    args.data = {pointer(data), numel() * static_cast<size_t>(rows), dtype};
    args.pieces = pieces();
    args.average = average;
    args.seed = seed;
    args.step = step;
    args.owner_residuals =
        std::any_of(args.pieces.begin(), args.pieces.end(),
                    [](const Piece& piece) { return static_cast<bool>(piece.owner.error); });
    return args;
  }

 private:
  std::vector<pybind11::object> codecs_;
};

}  // namespace pycomm

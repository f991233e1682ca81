// Arguments of collectives from Python: addresses, times in seconds, parts, pieces of a bucket.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
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
inline Op op_named(const std::string& text) {
  Op op{};
  while (name(op) != text) {
    if (op == Op::recv) throw Error("unknown op \"" + text + "\"; use the name of a collective");
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
  ConstParts input() const { return inputs_; }
  Parts output() const { return outputs_; }

 private:
  std::vector<ConstPart> inputs_;
  std::vector<Part> outputs_;
};

/// What Python passes for a parameter of the core: an address for a pointer, seconds for a time.
template <typename T>
struct Passed {
  using Type = std::decay_t<T>;
  static const Type& as(const Type& value) { return value; }
};
template <>
struct Passed<void*> {
  using Type = uintptr_t;
  static void* as(uintptr_t address) { return pointer(address); }
};
template <>
struct Passed<const void*> : Passed<void*> {};
template <>
struct Passed<Milliseconds> {
  using Type = double;
  static Milliseconds as(double seconds) { return milliseconds(seconds); }
};
template <>
struct Passed<const ConstParts&> {
  using Type = PartList;
  static ConstParts as(const PartList& parts) { return parts.input(); }
};
template <>
struct Passed<const Parts&> {
  using Type = PartList;
  static Parts as(const PartList& parts) { return parts.output(); }
};

/// Returns a function for Python that calls a method of the core, without the GIL.
template <typename Self, typename... Args>
auto of_core(void (Self::*method)(Args...)) {
  return [method](Self& self, const typename Passed<Args>::Type&... args) {
    const GilReleased release;
    (self.*method)(Passed<Args>::as(args)...);
  };
}

/// The pieces of a bucket, with the codecs kept alive. Built once, used in every step.
class Pieces {
 public:
  void add(size_t numel, const pybind11::object& codec, uint32_t tensor, uintptr_t residual,
           uintptr_t new_residual, uintptr_t owner_residual, uintptr_t new_owner_residual) {
    if (numel > kLargestBuffer / sizeof(float) - numel_) {
      throw Error("no memory holds pieces of " + std::to_string(numel) + " elements and " +
                  std::to_string(numel_) + " before them");
    }
    Piece piece;
    piece.offset = numel_;
    piece.numel = numel;
    piece.codec = codec.cast<const Codec*>();
    piece.tensor = tensor;
    piece.worker.error = {bytes(residual), bytes(new_residual)};
    piece.owner.error = {bytes(owner_residual), bytes(new_owner_residual)};
    pieces_.push_back(piece);
    codecs_.push_back(codec);
    numel_ += numel;
  }
  size_t numel() const { return numel_; }
  size_t size() const { return pieces_.size(); }
  /// Returns arguments for the values at an address: `rows` times the pieces, one after the other.
  CodedArgs args(uintptr_t data, int rows, DType dtype = DType::float32, bool average = false,
                 uint64_t seed = 0, uint32_t step = 0) const {
    if (numel_ > kLargestBuffer / static_cast<size_t>(rows)) {
      throw Error("no memory holds " + std::to_string(rows) + " rows of " + std::to_string(numel_) +
                  " elements");
    }
    CodedArgs args;
    args.data = {pointer(data), numel_ * static_cast<size_t>(rows), dtype};
    args.pieces = {pieces_.data(), pieces_.size()};
    args.average = average;
    args.seed = seed;
    args.step = step;
    args.owner_residuals = std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
      return static_cast<bool>(piece.owner.error);
    });
    return args;
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<pybind11::object> codecs_;
  size_t numel_ = 0;
};

}  // namespace pycomm

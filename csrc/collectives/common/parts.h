// Places of the data of every rank in one call: one part per rank, either equal parts of one buffer
// or a list of buffers of any sizes. These are views: they own neither the memory nor the list.
#pragma once
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/op.h"
#include "core/types.h"

namespace pycomm {

/// Data of one rank. `T` is void or const void.
template <typename T>
struct BasicPart {
  T* data = nullptr;
  size_t numel = 0;
};
using Part = BasicPart<void>;
using ConstPart = BasicPart<const void>;

template <typename T>
class BasicParts {
 public:
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;

  /// No parts: what a rooted op takes on the other ranks.
  BasicParts() = default;
  /// Equal parts: part r is `numel` elements at data + r * numel.
  BasicParts(T* data, size_t numel) : each_{data, numel} {}
  /// A list of parts: part r is list[r].
  BasicParts(Span<const BasicPart<T>> list) : list_(list) {}
  BasicParts(const std::vector<BasicPart<T>>& list) : list_(list.data(), list.size()) {}

  bool is_list() const { return list_.data != nullptr; }
  /// Length of the list, or 0 if there is none.
  size_t listed() const { return list_.size; }
  /// Start of the buffer, if there is no list.
  T* data() const { return each_.data; }
  size_t numel(int rank) const { return is_list() ? list_[rank].numel : each_.numel; }

  /// Returns the same parts with elements of this many bytes.
  BasicParts of(size_t element_bytes) const {
    BasicParts result = *this;
    result.element_bytes_ = element_bytes;
    return result;
  }
  /// Returns the same list, whose parts lie at equal distances from each other on all ranks.
  BasicParts aligned() const {
    BasicParts result = *this;
    result.aligned_ = true;
    return result;
  }
  /// True if all ranks' parts lie like ours, from their first part that is not empty on.
  bool is_aligned() const { return aligned_ || !is_list(); }
  size_t bytes(int rank) const { return numel(rank) * element_bytes_; }
  Span<Byte> operator[](int rank) const {
    if (is_list()) return {static_cast<Byte*>(list_[rank].data), bytes(rank)};
    return {static_cast<Byte*>(each_.data) + bytes(rank) * rank, bytes(rank)};
  }

  size_t total(int ranks) const {
    size_t sum = 0;
    for (int r = 0; r < ranks; r++) sum += numel(r);
    return sum;
  }
  /// True if all of `ranks` parts have one size.
  bool even(int ranks) const {
    for (int r = 1; r < ranks; r++) {
      if (numel(r) != numel(0)) return false;
    }
    return true;
  }

 private:
  BasicPart<T> each_;
  Span<const BasicPart<T>> list_;
  size_t element_bytes_ = 1;
  bool aligned_ = false;
};
using Parts = BasicParts<void>;
using ConstParts = BasicParts<const void>;

/// Copies bytes. Buffers may have no address when they are empty, and be the same when an operation
/// is in place.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

/// Parts of a buffer as a list: one after another.
template <typename T>
std::vector<BasicPart<T>> cut(T* data, const std::vector<size_t>& numels, DType dtype) {
  auto* place = static_cast<typename BasicParts<T>::Byte*>(data);
  std::vector<BasicPart<T>> list;
  for (const size_t numel : numels) {
    list.push_back({place, numel});
    place += numel * size_of(dtype);
  }
  return list;
}

}  // namespace pycomm

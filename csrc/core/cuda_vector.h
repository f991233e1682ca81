// Memory access of the CUDA kernels: a warp takes a tile of rows, a lane four neighbouring values
// of each row. So every access of float32 is 16 bytes wide, the accesses of a warp are one run, and
// all rows are in flight before the first is used. Compiled by nvcc and NVRTC.
#pragma once
#include "core/cuda_shape.h"
#include "core/types.h"

namespace pycomm::cuda {

/// Four neighbouring values, moved by one access.
template <typename T>
struct alignas(kVector * sizeof(T)) Vector {
  T v[kVector];
};

/// Stores by an intrinsic, since the compiler may split a plain store. It also asks the cache to
/// evict first what is written once and not read again by this kernel.
template <typename T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T>& from) {
  if constexpr (sizeof from == 16) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&from));
  } else {
    static_assert(sizeof from == 8);
    __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(&from));
  }
}

/// Part of an array of `size` values that belongs to this warp: rows of kRow values. A tile that is
/// cut by the end of the array, or whose arrays are not aligned, moves value by value instead.
template <int kRows>
class Tile {
 public:
  static constexpr int kValues = kRows * kRow;

  /// `block` is the number of this block of threads among those of the array. `pointers` are all
  /// arrays that load() and store() will be given; a null is aligned.
  template <typename... T>
  __device__ Tile(uint32_t block, size_t size, const T*... pointers) : size_(size) {
    const size_t begin = (size_t{block} * kWarps + threadIdx.x / kLanes) * kValues;
    first_ = begin + threadIdx.x % kLanes * kVector;
    empty_ = begin >= size;
    whole_ =
        opaque(begin + kValues <= size && (reinterpret_cast<size_t>(pointers) | ...) % 16 == 0);
  }

  /// True for all lanes of a warp or for none.
  __device__ bool empty() const { return empty_; }
  /// Index of the lane's first value in a row.
  __device__ size_t index(int row) const { return first_ + row * kRow; }

  /// Loads a row. Values beyond the end are 0.
  template <typename T>
  __device__ void load(const T* from, Vector<T> (&to)[kRows]) const {
    if (whole_ != 0) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        to[row] = *reinterpret_cast<const Vector<T>*>(from + index(row));
      }
    } else {
      const int left = left_of(size_);
#pragma unroll
      for (int row = 0; row < kRows; row++) to[row] = load_cut(from, row, left);
    }
  }

  template <typename T>
  __device__ Vector<T> load(const T* from, int row) const {
    if (whole_ != 0) return *reinterpret_cast<const Vector<T>*>(from + index(row));
    return load_cut(from, row, left_of(size_));
  }

  /// Stores a row. `to` has `size` values: those of the tile's arrays, or more if it is padded.
  template <typename T>
  __device__ void store(T* to, size_t size, const Vector<T> (&from)[kRows]) const {
    if (whole_ != 0) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        store_vector(to + index(row), from[row]);
      }
    } else {
      const int left = left_of(size);
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        for (int k = 0; k < kVector; k++) {
          if (row * kRow + k < left) to[index(row) + k] = from[row].v[k];
        }
      }
    }
  }

  /// Returns how many of `size` values there are from the lane's first one on, up to those of the
  /// tile.
  __device__ int left_of(size_t size) const {
    const size_t rest = first_ < size ? size - first_ : 0;
    return opaque(rest < kValues ? static_cast<int>(rest) : kValues);
  }

 private:
  template <typename T>
  __device__ Vector<T> load_cut(const T* from, int row, int left) const {
    Vector<T> to;
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      to.v[k] = row * kRow + k < left ? from[index(row) + k] : T{0};
    }
    return to;
  }

  /// Returns x as something that a compiler does not know: else it computes each comparison with it
  /// once more, before all branches.
  __device__ static int opaque(int x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
  }

  size_t first_;
  size_t size_;
  bool empty_;
  int whole_;
};

}  // namespace pycomm::cuda

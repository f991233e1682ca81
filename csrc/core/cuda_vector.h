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

/// Memory of a warp for a row of values of up to four bytes.
__device__ __forceinline__ void* row_of_warp() {
  __shared__ Vector<float> rows[kThreads];
  return rows + threadIdx.x / kLanes * kLanes;
}

/// Part of an array of `size` values that belongs to this warp: rows of kRow values. Where one of
/// the arrays is not aligned to 16 bytes, as the pieces of a bucket behind a parameter of odd size,
/// neighbouring lanes move neighbouring values, which is as fast, and exchange them in shared
/// memory. A tile that is cut by the end of the array moves value by value instead.
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
    const bool aligned = (reinterpret_cast<size_t>(pointers) | ...) % 16 == 0;
    form_ = opaque(begin + kValues > size ? kCut : aligned ? kAligned : kShifted);
  }

  /// True for all lanes of a warp or for none.
  __device__ bool empty() const { return empty_; }
  /// Index of the lane's first value in a row.
  __device__ size_t index(int row) const { return first_ + row * kRow; }

  /// Loads the rows. Values beyond the end are 0. Called by all lanes of a warp, as store().
  template <typename T>
  __device__ void load(const T* from, Vector<T> (&to)[kRows]) const {
    if (form_ == kAligned) {
#pragma unroll
      for (int row = 0; row < kRows; row++) to[row] = load_aligned(from, row);
    } else if (form_ == kShifted) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        for (int k = 0; k < kVector; k++) to[row].v[k] = from[strided(row, k)];
      }
#pragma unroll
      for (int row = 0; row < kRows; row++) to[row] = gathered(to[row]);
    } else {
      const int left = left_of(size_);
#pragma unroll
      for (int row = 0; row < kRows; row++) to[row] = load_cut(from, row, left);
    }
  }

  /// Loads a row. The other lanes need not call it.
  template <typename T>
  __device__ Vector<T> load(const T* from, int row) const {
    return form_ == kAligned ? load_aligned(from, row) : load_cut(from, row, left_of(size_));
  }

  /// `to` has `size` values: those of the tile's arrays, or more if it is padded.
  template <typename T>
  __device__ void store(T* to, size_t size, const Vector<T> (&from)[kRows]) const {
    if (form_ == kAligned) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        store_vector(to + index(row), from[row]);
      }
    } else if (form_ == kShifted) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        const Vector<T> values = scattered(from[row]);
        for (int k = 0; k < kVector; k++) to[strided(row, k)] = values.v[k];
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
  enum Form : int { kCut, kAligned, kShifted };

  template <typename T>
  __device__ Vector<T> load_aligned(const T* from, int row) const {
    return *reinterpret_cast<const Vector<T>*>(from + index(row));
  }

  template <typename T>
  __device__ Vector<T> load_cut(const T* from, int row, int left) const {
    Vector<T> to;
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      to.v[k] = row * kRow + k < left ? from[index(row) + k] : T{0};
    }
    return to;
  }

  /// Index of the k-th value that a lane moves where neighbouring lanes move neighbours.
  __device__ size_t strided(int row, int k) const {
    return index(row) - lane() * kVector + k * kLanes + lane();
  }
  /// Returns a lane's own four neighbours of the values of a row at strided().
  template <typename T>
  __device__ static Vector<T> gathered(const Vector<T>& values) {
    T* const memory = static_cast<T*>(row_of_warp());
    __syncwarp();  // all have read the previous contents
#pragma unroll
    for (int k = 0; k < kVector; k++) memory[k * kLanes + lane()] = values.v[k];
    __syncwarp();
    return *reinterpret_cast<const Vector<T>*>(memory + lane() * kVector);
  }
  /// The inverse.
  template <typename T>
  __device__ static Vector<T> scattered(const Vector<T>& values) {
    T* const memory = static_cast<T*>(row_of_warp());
    __syncwarp();
    *reinterpret_cast<Vector<T>*>(memory + lane() * kVector) = values;
    __syncwarp();
    Vector<T> to;
#pragma unroll
    for (int k = 0; k < kVector; k++) to.v[k] = memory[k * kLanes + lane()];
    return to;
  }
  __device__ static uint32_t lane() { return threadIdx.x % kLanes; }

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
  int form_;
};

}  // namespace pycomm::cuda

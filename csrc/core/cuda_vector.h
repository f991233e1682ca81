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

/// Returns x as something that a compiler does not know: else it computes each comparison with it
/// once more, before all branches, or makes a table of jumps of several.
__device__ __forceinline__ int opaque(int x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

/// Memory of a warp for a row of values of up to four bytes.
__device__ __forceinline__ void* row_of_warp() {
  __shared__ Vector<float> rows[kThreads];
  return rows + threadIdx.x / kLanes * kLanes;
}

/// Part of an array of `size` values that belongs to this warp: kRowLanes lanes have kRows rows,
/// one behind the other, the next lanes the rows behind these. Where one of the arrays is not
/// aligned to 16 bytes, as the pieces of a bucket behind a parameter of odd size, neighbouring
/// lanes move neighbouring values, which is as fast, and exchange them in shared memory. A tile
/// that is cut by the end of the array moves value by value instead.
template <int kRows, int kRowLanes = kLanes>
class Tile {
 public:
  static constexpr int kRow = kRowLanes * kVector;  ///< values of a row
  static constexpr int kValues = kRows * kLanes * kVector;

  /// `block` is the number of this block of threads among those of the array. `pointers` are all
  /// arrays that load() and store() will be given; a null is aligned.
  template <typename... T>
  __device__ Tile(uint32_t block, size_t size, const T*... pointers) : size_(size) {
    const size_t begin = (size_t{block} * kWarps + threadIdx.x / kLanes) * kValues;
    first_ = begin + in_tile(0);
    empty_ = begin >= size;
    const bool aligned = (reinterpret_cast<size_t>(pointers) | ...) % 16 == 0;
    form_ = opaque(begin + kValues > size ? kCut : aligned ? kAligned : kShifted);
  }

  /// True for all lanes of a warp or for none.
  __device__ bool empty() const { return empty_; }
  /// Index of the lane's first value in a row.
  __device__ size_t index(int row) const { return first_ + row * kRow; }
  /// The same in vectors: with the distance of rows a constant, addresses of all rows are one.
  __device__ size_t vector(int row) const { return first_ / kVector + row * kLanes; }
  /// Number of the first block of 1 << bits values of the tile, which holds whole blocks; and of
  /// that in which the lane's values of a row lie, from there on.
  __device__ size_t first_block(uint32_t bits) const { return (first_ - in_tile(0)) >> bits; }
  __device__ uint32_t next_block(int row, uint32_t bits) const { return in_tile(row) >> bits; }
  /// True if vectors of all arrays can be moved by one access.
  __device__ bool aligned() const { return form_ == kAligned; }
  /// True if the end of the array does not cut the tile.
  __device__ bool whole() const { return form_ != kCut; }

  /// Loads the rows. Values beyond the end are 0. Called by all lanes of a warp, as store().
  template <typename T>
  __device__ void load(const T* from, Vector<T> (&to)[kRows]) const {
    each(from, [&](int row, const Vector<T>& values) { to[row] = values; });
  }

  /// Calls f(row, values) for each row, when all are loaded: for each form of a tile, so that what
  /// f computes of two values at once is not taken apart where the forms meet.
  template <typename T, typename F>
  __device__ __forceinline__ void each(const T* from, const F& f) const {
    Vector<T> values[kRows];
    if (form_ == kAligned) {
#pragma unroll
      for (int row = 0; row < kRows; row++) values[row] = load_aligned(from, row);
#pragma unroll
      for (int row = 0; row < kRows; row++) f(row, values[row]);
    } else if (form_ == kShifted) {
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        for (int k = 0; k < kVector; k++) values[row].v[k] = from[strided(row, k)];
      }
#pragma unroll
      for (int row = 0; row < kRows; row++) f(row, gathered(values[row]));
    } else {
      const int left = left_of(size_);
#pragma unroll
      for (int row = 0; row < kRows; row++) values[row] = load_cut(from, row, left);
#pragma unroll
      for (int row = 0; row < kRows; row++) f(row, values[row]);
    }
  }

  /// Loads a row. The other lanes need not call it.
  template <typename T>
  __device__ Vector<T> load(const T* from, int row) const {
    return form_ == kAligned ? load_aligned(from, row) : load_cut(from, row, left_of(size_));
  }

  /// Loads a row of a tile that is aligned().
  template <typename T>
  __device__ Vector<T> load_aligned(const T* from, int row) const {
    const T* const at = from + index(row);
    if constexpr (sizeof(Vector<T>) == 8) {  // as words, of which each has two values
      const uint2 words = *reinterpret_cast<const uint2*>(at);
      Vector<T> values;
      memcpy(&values, &words, sizeof values);
      return values;
    } else {
      return *reinterpret_cast<const Vector<T>*>(at);
    }
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

  /// Returns how many of `size` values the tile has.
  __device__ uint32_t left_of_tile(size_t size) const {
    const size_t begin = first_ - in_tile(0), rest = begin < size ? size - begin : 0;
    return rest < kValues ? static_cast<uint32_t>(rest) : kValues;
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
    return index(row) - place() * kVector + k * kRowLanes + place();
  }
  /// Returns a lane's own four neighbours of the values of a row at strided().
  template <typename T>
  __device__ static Vector<T> gathered(const Vector<T>& values) {
    T* const memory = static_cast<T*>(row_of_warp());
    __syncwarp();  // all have read the previous contents
#pragma unroll
    for (int k = 0; k < kVector; k++) memory[exchanged(k)] = values.v[k];
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
    for (int k = 0; k < kVector; k++) to.v[k] = memory[exchanged(k)];
    return to;
  }
  /// Place of that value among those of the warp.
  __device__ static uint32_t exchanged(int k) {
    return lane() / kRowLanes * kRow + k * kRowLanes + place();
  }
  __device__ static uint32_t lane() { return threadIdx.x % kLanes; }
  __device__ static uint32_t place() { return threadIdx.x % kRowLanes; }  ///< in its row
  __device__ static uint32_t in_tile(int row) {
    return lane() / kRowLanes * (kRows * kRow) + place() * kVector + row * kRow;
  }

  size_t first_;
  size_t size_;
  bool empty_;
  int form_;
};

}  // namespace pycomm::cuda

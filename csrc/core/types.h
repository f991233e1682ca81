// Plain types that every layer shares. No torch, no CUDA headers.
#pragma once
#ifndef __CUDACC_RTC__
#include <cstddef>
#include <cstdint>
#else  // NVRTC knows size_t, and has no standard headers.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PYCOMM_HD __host__ __device__ __forceinline__
#else
// Always inlined: a call out of a PYCOMM_SIMD loop would prevent vectorisation.
#define PYCOMM_HD inline __attribute__((always_inline))
#endif
// Compiles a plain loop for several x86 levels; the loader picks one. All give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(PYCOMM_NO_SIMD)
#define PYCOMM_SIMD __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PYCOMM_SIMD
#endif
#define PYCOMM_API __attribute__((visibility("default")))

namespace pycomm {

enum class Device : uint8_t { cpu, cuda };

/// Non-owning run of `size` elements. Owners live in the layers above; nothing below frees memory.
template <typename T>
struct Span {
  T* data = nullptr;
  size_t size = 0;

  Span() = default;
  Span(T* data, size_t size) : data(data), size(size) {}
  /// Converts Span<T> to Span<const T>.
  template <typename U>
  Span(const Span<U>& other) : data(other.data), size(other.size) {}

  Span sub(size_t offset, size_t count) const { return {data + offset, count}; }
  T& operator[](size_t i) const { return data[i]; }
  T* begin() const { return data; }
  T* end() const { return data + size; }
};

/// Queue for work. `handle` is a cudaStream_t on cuda and null on cpu.
struct Stream {
  Device device = Device::cpu;
  void* handle = nullptr;
  /// On cuda: memory for work that is queued here, aligned to 16 bytes. Successive calls may use
  /// the same memory, since the work runs in order. Functions that use it document how much they
  /// need.
  Span<uint8_t> scratch = {};
};

/// Element types. The numbers travel on the wire: append, never renumber.
enum class DType : uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  float8_e4m3,  ///< torch.float8_e4m3fn
  float8_e5m2,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  complex64,
  complex128,
};
constexpr int kDTypes = 17;

/// Reductions. The numbers travel on the wire: append, never renumber.
enum class ReduceOp : uint8_t { sum, avg, premul_sum, prod, min, max, band, bor, bxor };
constexpr int kReduceOps = 9;

}  // namespace pycomm

// Executors of the collective kernels: a GPU, whose thread blocks run in parallel, or the CPU,
// which runs one block of one thread after the other. A kernel is one source for both; the
// differences are in this file.
#pragma once
#include "core/types.h"

#if defined(__CUDACC__)
#define PYCOMM_KERNEL __device__ __forceinline__
#define PYCOMM_UNROLL _Pragma("unroll")
#define PYCOMM_NO_UNROLL _Pragma("unroll 1")
#else
#include <sched.h>

#include <chrono>
#define PYCOMM_KERNEL inline
#define PYCOMM_UNROLL
#define PYCOMM_NO_UNROLL
#endif

namespace pycomm::device {

#if defined(__CUDACC__)

/// Threads of a block, which may have a multiprocessor to itself: 128 registers for each.
constexpr int kThreads = 512;

struct Gpu {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }

  /// Synchronizes the block and returns true if all its threads say yes.
  __device__ bool all(bool yes) const { return __syncthreads_and(yes) != 0; }

  // Words that other GPUs and the host write, with all that was written before them.
  __device__ static uint64_t acquire(const uint64_t* from) {
    uint64_t word;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
  }
  __device__ static void release(uint64_t* to, uint64_t word) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(word) : "memory");
  }
  __device__ static uint32_t load_relaxed(const uint32_t* from) {
    uint32_t word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
  }
  __device__ static void store_relaxed(uint32_t* to, uint32_t word) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(word) : "memory");
  }

  /// Returns the time in nanoseconds.
  __device__ static uint64_t now() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  }
  /// Pause between two polls.
  __device__ static void pause() { __nanosleep(20); }
  /// Number of polls between two checks of the clock and of the host.
  static constexpr uint32_t kPollsPerCheck = 1024;
};

#else

struct Cpu {
  int index, count;

  int thread() const { return 0; }
  int threads() const { return 1; }
  int block() const { return index; }
  int blocks() const { return count; }
  bool all(bool yes) const { return yes; }

  static uint64_t acquire(const uint64_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
  static void release(uint64_t* to, uint64_t word) { __atomic_store_n(to, word, __ATOMIC_RELEASE); }
  static uint32_t load_relaxed(const uint32_t* from) {
    return __atomic_load_n(from, __ATOMIC_RELAXED);
  }
  static void store_relaxed(uint32_t* to, uint32_t word) {
    __atomic_store_n(to, word, __ATOMIC_RELAXED);
  }

  static uint64_t now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  }
  /// Yields, since ranks may outnumber cores.
  static void pause() { ::sched_yield(); }
  static constexpr uint32_t kPollsPerCheck = 16;
};

#endif

}  // namespace pycomm::device

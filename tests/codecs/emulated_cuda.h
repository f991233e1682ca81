// Enough of CUDA for g++ to run the kernels of csrc/codecs: a warp is 32 coroutines that meet at
// every shuffle, and warps run one after the other.
#pragma once
#define __CUDACC_RTC__  // leaves out the launchers, as NVRTC does
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

using std::max;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct Dim {
  unsigned x;
};

static Dim blockIdx, threadIdx;

namespace emulated {

constexpr unsigned kLanes = 32, kThreads = 256;
constexpr size_t kStack = 64 * 1024;

struct Lane {
  ucontext_t context;
  alignas(16) char stack[kStack];
  bool done;
};

static Lane lanes[kLanes];
static ucontext_t scheduler;
static std::function<void()> body;
static uint32_t exchanged[kLanes];

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

inline unsigned lane() { return threadIdx.x % kLanes; }

inline void wait_for_warp() { swapcontext(&lanes[lane()].context, &scheduler); }

inline void run_lane() {
  body();
  lanes[lane()].done = true;
}

inline void run_warp(unsigned first_thread) {
  for (unsigned i = 0; i < kLanes; i++) {
    lanes[i].done = false;
    getcontext(&lanes[i].context);
    lanes[i].context.uc_stack.ss_sp = lanes[i].stack;
    lanes[i].context.uc_stack.ss_size = kStack;
    lanes[i].context.uc_link = &scheduler;
    makecontext(&lanes[i].context, run_lane, 0);
  }
  for (unsigned running = kLanes; running > 0;) {
    for (unsigned i = 0; i < kLanes; i++) {
      threadIdx.x = first_thread + i;
      swapcontext(&scheduler, &lanes[i].context);
    }
    running = 0;
    for (const Lane& l : lanes) running += !l.done;
    if (running != 0 && running != kLanes) die("a lane left while others wait at a shuffle");
  }
}

inline void launch(unsigned blocks, const std::function<void()>& kernel) {
  body = kernel;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    for (unsigned first = 0; first < kThreads; first += kLanes) run_warp(first);
  }
}

}  // namespace emulated

inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int other) {
  if (mask != ~0u) emulated::die("a shuffle that is not of the whole warp");
  emulated::exchanged[emulated::lane()] = value;
  emulated::wait_for_warp();
  const uint32_t got = emulated::exchanged[emulated::lane() ^ other];
  emulated::wait_for_warp();
  return got;
}

inline uint32_t __shfl_sync(unsigned mask, uint32_t value, int from) {
  if (mask != ~0u) emulated::die("a shuffle that is not of the whole warp");
  emulated::exchanged[emulated::lane()] = value;
  emulated::wait_for_warp();
  const uint32_t got = emulated::exchanged[from];
  emulated::wait_for_warp();
  return got;
}

template <typename Word>
void __stcs(Word* to, const Word& value) {
  if (reinterpret_cast<size_t>(to) % sizeof(Word) != 0) emulated::die("a store is not aligned");
  *to = value;
}

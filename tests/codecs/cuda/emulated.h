// Subset of CUDA with which g++ compiles the kernels of csrc/codecs for the CPU: the threads of a
// block are coroutines that synchronize at every shuffle of their warp and at every barrier of
// their block. Blocks run one after the other, so shared memory is static.
#pragma once
#define __CUDACC_RTC__
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

using std::fabs;
using std::fmaf;
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

static Dim blockIdx, threadIdx, gridDim;

namespace emulated {

constexpr unsigned kLanes = 32, kThreads = 256;
constexpr size_t kStack = 64 * 1024;

/// The event that a thread waits for.
enum class Wait { none, warp, block, end };

struct Thread {
  ucontext_t start;
  jmp_buf here;
  alignas(16) char stack[kStack];
  bool started;
  Wait wait;
};

static Thread threads[kThreads];
static jmp_buf scheduler;
static std::function<void()> body;
/// Words of the last two shuffles of each warp: a thread may begin the next shuffle before the
/// others have read theirs.
static uint32_t exchanged[2][kThreads];
static bool turn[kThreads];
static int votes[2][kThreads];
static bool block_turn[kThreads];

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

inline void wait(Wait what) {
  Thread& self = threads[threadIdx.x];
  self.wait = what;
  if (_setjmp(self.here) == 0) _longjmp(scheduler, 1);
}

inline void run_body() {
  body();
  threads[threadIdx.x].wait = Wait::end;
  _longjmp(scheduler, 1);
}

/// Runs a thread until it waits again. Jumps, which do not save the signal mask, are several times
/// as fast as swapcontext().
inline void run_thread(unsigned index) {
  threadIdx.x = index;
  Thread& thread = threads[index];
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  setcontext(&thread.start);
}

/// Runs a warp until all its lanes are at a barrier of the block, or at their end.
inline Wait run_warp(unsigned first) {
  for (;;) {
    for (unsigned i = first; i < first + kLanes; i++) run_thread(i);
    const Wait reached = threads[first].wait;
    for (unsigned i = first; i < first + kLanes; i++) {
      if (threads[i].wait != reached) die("the lanes of a warp wait for different things");
    }
    if (reached != Wait::warp) return reached;
  }
}

inline void run_block() {
  for (Thread& thread : threads) {
    thread.started = false;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack;
    thread.start.uc_stack.ss_size = kStack;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, run_body, 0);
  }
  for (;;) {
    const Wait reached = run_warp(0);
    for (unsigned first = kLanes; first < kThreads; first += kLanes) {
      if (run_warp(first) != reached) die("a warp left while others wait at a barrier");
    }
    if (reached == Wait::end) return;
  }
}

inline void launch(unsigned blocks, const std::function<void()>& kernel) {
  body = kernel;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block();
}

/// Shares a word with the warp and returns the words of all its lanes.
inline const uint32_t* exchange(unsigned mask, uint32_t value) {
  if (mask != ~0u) die("a shuffle that is not of the whole warp");
  const unsigned me = threadIdx.x;
  uint32_t* words = exchanged[turn[me] = !turn[me]];
  words[me] = value;
  wait(Wait::warp);
  return words + me / kLanes * kLanes;
}

inline unsigned lane() { return threadIdx.x % kLanes; }

}  // namespace emulated

inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int other) {
  return emulated::exchange(mask, value)[emulated::lane() ^ other];
}

inline uint32_t __shfl_sync(unsigned mask, uint32_t value, int from,
                            unsigned width = emulated::kLanes) {
  const uint32_t* words = emulated::exchange(mask, value);
  return words[emulated::lane() / width * width + static_cast<unsigned>(from) % width];
}

inline uint32_t __shfl_up_sync(unsigned mask, uint32_t value, unsigned by) {
  const unsigned lane = emulated::lane();
  return emulated::exchange(mask, value)[lane < by ? lane : lane - by];
}

inline uint32_t __ballot_sync(unsigned mask, bool vote) {
  const uint32_t* votes = emulated::exchange(mask, vote);
  uint32_t all = 0;
  for (unsigned i = 0; i < emulated::kLanes; i++) all |= votes[i] << i;
  return all;
}

inline int __syncthreads_or(int vote) {
  const unsigned me = threadIdx.x;
  int* votes = emulated::votes[emulated::block_turn[me] = !emulated::block_turn[me]];
  votes[me] = vote;
  emulated::wait(emulated::Wait::block);
  return std::any_of(votes, votes + emulated::kThreads, [](int v) { return v != 0; });
}

inline void __syncwarp() { emulated::wait(emulated::Wait::warp); }
inline void __syncthreads() { emulated::wait(emulated::Wait::block); }
inline void __threadfence() {}

inline uint32_t atomicAdd(uint32_t* to, uint32_t value) { return (*to += value) - value; }
inline void atomicOr(uint32_t* to, uint32_t value) { *to |= value; }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, unsigned by) {
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (by & 31)) >> 32);
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t pick) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; i++) {
    bytes |= static_cast<uint32_t>(both >> 8 * (pick >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return bytes;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline float __ldcg(const float* from) { return *from; }

template <typename Word>
void __stcs(Word* to, const Word& value) {
  if (reinterpret_cast<size_t>(to) % sizeof(Word) != 0) emulated::die("a store is not aligned");
  *to = value;
}

// The table of a .cu file: csrc/codecs/base/kernels_cuda.h defines the same macros for nvcc.
namespace emulated {

struct Kernel {
  std::string name;
  size_t params;
  std::function<void(const void*)> run;
};

inline std::map<std::string, Kernel>& table() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

template <typename Params>
Kernel kernel(const char* name, void (*function)(Params)) {
  return {name, sizeof(Params),
          [=](const void* params) { function(*static_cast<const Params*>(params)); }};
}

struct Kernels {
  Kernels(std::initializer_list<Kernel> kernels) {
    for (const Kernel& each : kernels) table()[each.name] = each;
  }
};

}  // namespace emulated

#define PYCOMM_KERNELS(file, ...) static const emulated::Kernels file##_kernels({__VA_ARGS__})
#define PYCOMM_KERNEL(...) emulated::kernel(#__VA_ARGS__, __VA_ARGS__)

/// Runs a kernel. Returns 1 if no file lists it, 2 if its argument has another size.
extern "C" int run(const char* name, unsigned blocks, const void* params, size_t size) {
  const auto found = emulated::table().find(name);
  if (found == emulated::table().end()) return 1;
  const emulated::Kernel& kernel = found->second;
  if (kernel.params != size) return 2;
  emulated::launch(blocks, [&] { kernel.run(params); });
  return 0;
}

/// Returns the names of all kernels, a line each.
extern "C" const char* listed() {
  static std::string names;
  names.clear();
  for (const auto& [name, kernel] : emulated::table()) names += name + "\n";
  return names.c_str();
}

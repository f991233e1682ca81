// Launch of collective kernels on a GPU: host code of .cu files.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "collectives/device/calls.h"
#include "collectives/device/executor.h"
#include "collectives/device/reduce.h"
#include "core/error.h"

namespace pycomm::device::gpu {

inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // clears the error for the next launch
  throw Error(std::string("cuda: cannot ") + what + ": " + cudaGetErrorString(code));
}

template <typename Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes about{};
  check(cudaFuncGetAttributes(&about, kernel), "load a collective");
}

template <typename Args>
void launch(void (*kernel)(Args), const Args& args, int blocks, Stream stream) {
  // Not by <<<>>>, whose error may be that of an earlier call that nobody has looked at.
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(kThreads),
                         arguments, 0, static_cast<cudaStream_t>(stream.handle)),
        "start a collective");
}

template <typename Kernel>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_kernel(const __grid_constant__ ReduceCall args) {
  Kernel::run(Gpu{}, args);
}

/// Functor that is passed to a visit_*().
struct Launch {
  const ReduceCall& call;
  int blocks;
  Stream stream;

  template <typename Kernel>
  void operator()(Kernel) const {
    launch(reduce_kernel<Kernel>, call, blocks, stream);
  }
};

struct Load {
  template <typename Kernel>
  void operator()(Kernel) const {
    load(reduce_kernel<Kernel>);
  }
};

}  // namespace pycomm::device::gpu

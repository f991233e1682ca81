// Starts a collective kernel on a GPU. Host code of .cu files.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "collectives/device_calls.h"
#include "collectives/device_machine.h"
#include "core/error.h"

namespace pycomm::device::gpu {

inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the next launch shall not find it
  throw Error(std::string("cuda: cannot ") + what + ": " + cudaGetErrorString(code));
}

template <typename Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes about{};
  check(cudaFuncGetAttributes(&about, kernel), "load a collective");
}

template <typename Args>
void launch(void (*kernel)(Args), const Args& args, int blocks, Stream stream) {
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(args);
  check(cudaGetLastError(), "start a collective");
}

}  // namespace pycomm::device::gpu

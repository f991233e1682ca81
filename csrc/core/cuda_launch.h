// Kernel launch from C++: the launch with its check, and run-time flags as template arguments. Host
// code of .cu files.
#pragma once
#include <cuda_runtime.h>

#include <string>
#include <type_traits>
#include <utility>

#include "core/cuda_vector.h"
#include "core/error.h"

namespace pycomm::cuda {

/// Calls f(std::true_type) or f(std::false_type).
template <typename F>
void dispatch(bool value, F&& f) {
  if (value) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

/// Runs `kernel` over tiles of `tile` values on the stream of the caller, whose device is current.
template <typename Params>
void launch(const char* name, void (*kernel)(Params), const Params& params, size_t numel, int tile,
            Stream stream) {
  if (numel == 0) return;
  const size_t per_block = size_t{kWarps} * tile;
  const auto blocks = static_cast<unsigned>((numel + per_block - 1) / per_block);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  if (const cudaError_t code = cudaGetLastError(); code != cudaSuccess) {
    throw Error(std::string(name) + " on " + std::to_string(numel) +
                " values: " + cudaGetErrorString(code));
  }
}

}  // namespace pycomm::cuda

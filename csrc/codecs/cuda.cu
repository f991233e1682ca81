// Kernels in a build with CUDA, found by their names; no_cuda.cpp is for a build without.
#include <cuda_runtime.h>

#include <string>
#include <unordered_map>

#include "codecs/base/kernels_cuda.h"
#include "codecs/base/launch.h"
#include "core/error.h"

namespace pycomm::codecs {
namespace {

/// Returns the table, which is filled while the library is loaded and not changed afterwards.
std::unordered_map<std::string_view, Kernel>& table() {
  static std::unordered_map<std::string_view, Kernel> kernels;
  return kernels;
}

}  // namespace

Kernels::Kernels(std::initializer_list<Kernel> kernels) {
  for (const Kernel& each : kernels) table().emplace(each.name, each);
}

bool cuda_built() { return true; }

void start(const Launch& launch, const Stream& stream) {
  const auto found = table().find(launch.kernel);
  std::vector<uint8_t> batch = launch.argument();
  if (found == table().end() || found->second.params != batch.size()) {
    throw Error(launch.codec + ": no .cu file lists the kernel " + launch.kernel + " with " +
                std::to_string(batch.size()) + " bytes of arguments");
  }
  void* arguments[] = {batch.data()};
  const cudaError_t code =
      cudaLaunchKernel(found->second.function, dim3(launch.blocks), dim3(cuda::kThreads), arguments,
                       0, static_cast<cudaStream_t>(stream.handle));
  if (code != cudaSuccess) {
    cudaGetLastError();  // clears the error for the next launch
    throw Error(launch.codec + " in " + launch.kernel + ": " + cudaGetErrorString(code));
  }
}

void load_kernels() {
  for (const auto& [name, kernel] : table()) {
    cudaFuncAttributes about{};
    if (cudaFuncGetAttributes(&about, kernel.function) == cudaSuccess) continue;
    cudaGetLastError();  // clears the error for the next launch
    throw Error("cuda cannot load the kernel " + std::string(name));
  }
}

}  // namespace pycomm::codecs

// Kernels in this build: cuda.cu has what the .cu files list (base/kernels_cuda.h); no_cuda.cpp is
// for a build without CUDA, where start() (base/launch.h) and load_kernels() throw Error. CMake
// picks one; no other source depends on what was built.
#pragma once
#include <string_view>

#include "codecs/base/launch.h"

namespace pycomm::codecs {

PYCOMM_API bool cuda_built();

/// Loads the kernels whose names begin like this onto the current GPU: loading one later may wait
/// for others that run.
void load_kernels(std::string_view prefix);

}  // namespace pycomm::codecs

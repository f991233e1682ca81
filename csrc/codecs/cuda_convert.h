// CUDA part of convert: convert.cu, or no_cuda.cpp in a build without CUDA.
#pragma once
#include "codecs/convert.h"

namespace pycomm::codecs::convert {

/// Converts values on the GPU. convert.cpp checks the arguments.
void convert_cuda(const ConvertArgs& args);
/// Loads the kernels onto the current GPU: loading one later may wait for others that run.
void load_convert();

}  // namespace pycomm::codecs::convert

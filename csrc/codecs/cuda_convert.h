// The CUDA half of convert: convert.cu, or convert_no_cuda.cpp in a build without CUDA.
#pragma once
#include "codecs/convert.h"

namespace pycomm::codecs::convert {

/// Arguments are checked by convert.cpp.
void convert_cuda(const ConvertArgs& args);
/// Loads the kernels onto the current GPU: loading one later may wait for others that run.
void load_convert();

}  // namespace pycomm::codecs::convert

// CUDA parts of the codecs in a build with CUDA; no_cuda.cpp is for a build without.
#include "codecs/cuda.h"

namespace pycomm::codecs {

bool cuda_built() { return true; }

}  // namespace pycomm::codecs

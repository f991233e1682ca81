// This libpycomm has the CUDA halves of the codecs; the other answer is in no_cuda.cpp.
#include "codecs/cuda.h"

namespace pycomm::codecs {

bool cuda_built() { return true; }

}  // namespace pycomm::codecs

// Stands in for convert.cu in a build without CUDA.
#include "codecs/cuda_convert.h"
#include "core/error.h"

namespace pycomm::codecs::convert {

void convert_cuda(const ConvertArgs&) {
  throw Error("convert: this pycomm was built without CUDA; build it where nvcc is found");
}

}  // namespace pycomm::codecs::convert

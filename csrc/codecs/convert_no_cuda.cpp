// Stands in for convert.cu in a build without CUDA.
#include "codecs/cuda_convert.h"
#include "core/error.h"

namespace pycomm::codecs::convert {

namespace {

[[noreturn]] void fail() {
  throw Error("convert: this pycomm was built without CUDA; build it where nvcc is found");
}

}  // namespace

void convert_cuda(const ConvertArgs&) { fail(); }
void load_convert() { fail(); }

}  // namespace pycomm::codecs::convert

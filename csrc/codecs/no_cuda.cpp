// Kernels in a build without CUDA: there are none.
#include "codecs/base/launch.h"
#include "core/error.h"

namespace pycomm::codecs {
namespace {

[[noreturn]] void fail() {
  throw Error("codecs on cuda: this pycomm was built without CUDA; install pycomm-cuda13");
}

}  // namespace

bool cuda_built() { return false; }
void start(const Launch&, const Stream&) { fail(); }
void load_kernels() { fail(); }

}  // namespace pycomm::codecs

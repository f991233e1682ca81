// Reductions of float32, float64 and of products of complex numbers on a GPU. The kernel is in
// device/reduce.h.
#include "collectives/device/launch.h"

namespace pycomm::device::gpu {

void reduce_float(const ReduceCall& call, DType dtype, int blocks, Stream stream) {
  visit_float(dtype, Launch{call, blocks, stream});
}

void load_float() {
  for (const DType dtype : {DType::float32, DType::float64, DType::complex64, DType::complex128})
    visit_float(dtype, Load{});
}

}  // namespace pycomm::device::gpu

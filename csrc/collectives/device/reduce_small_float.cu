// Reductions of 16- and 8-bit floats on a GPU. The kernel is in device/reduce.h.
#include "collectives/device/launch.h"

namespace pycomm::device::gpu {

void reduce_small_float(const ReduceCall& call, DType dtype, int blocks, Stream stream) {
  visit_small_float(dtype, Launch{call, blocks, stream});
}

void load_small_float() {
  for (const DType dtype :
       {DType::float16, DType::bfloat16, DType::float8_e4m3, DType::float8_e5m2})
    visit_small_float(dtype, Load{});
}

}  // namespace pycomm::device::gpu

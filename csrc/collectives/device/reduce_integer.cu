// Reductions of integers on a GPU. The kernel is in device/reduce.h.
#include "collectives/device/launch.h"

namespace pycomm::device::gpu {

void reduce_integer(const ReduceCall& call, DType dtype, int blocks, Stream stream) {
  visit_integer(dtype, Launch{call, blocks, stream});
}

void load_integer() {
  for (const DType dtype : {DType::int8, DType::int16, DType::int32, DType::int64, DType::uint8,
                            DType::uint16, DType::uint32, DType::uint64})
    visit_integer(dtype, Load{});
}

}  // namespace pycomm::device::gpu

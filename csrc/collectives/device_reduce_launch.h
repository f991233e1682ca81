// The kernels of the reductions on a GPU, for the .cu files that make them.
#pragma once
#include "collectives/device_launch.h"
#include "collectives/device_reduce.h"

namespace pycomm::device::gpu {

template <typename Kernel>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_kernel(const __grid_constant__ ReduceCall args) {
  Kernel::run(Gpu{}, args);
}

/// Passed to a visit_*().
struct Launch {
  const ReduceCall& call;
  int blocks;
  Stream stream;

  template <typename Kernel>
  void operator()(Kernel) const {
    launch(reduce_kernel<Kernel>, call, blocks, stream);
  }
};

struct Load {
  template <typename Kernel>
  void operator()(Kernel) const {
    load(reduce_kernel<Kernel>);
  }
};

}  // namespace pycomm::device::gpu

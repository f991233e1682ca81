// AdamW (adamw.h) on a GPU, for many tensors in one launch. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/warp_cuda.h"
#include "optim/adamw_params.h"

namespace pycomm::adamw {

__global__ void __launch_bounds__(cuda::kThreads) step(const codecs::Batch<StepParams> batch) {
  const StepParams args = codecs::place_of_block(batch);
  const size_t begin = size_t{codecs::block_of(args)} * cuda::kThreads * kEach + threadIdx.x;
#pragma unroll
  for (size_t k = 0; k < kEach; k++) {
    const size_t i = begin + k * cuda::kThreads;
    if (i >= args.numel) return;
    step_value(args.values[i], args.gradient[i], args.momentum[i], args.squares[i], args.by);
  }
}

}  // namespace pycomm::adamw

namespace pycomm::codecs {

PYCOMM_KERNELS(adamw, PYCOMM_KERNEL(pycomm::adamw::step));

}  // namespace pycomm::codecs

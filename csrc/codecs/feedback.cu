// Loading and storing of residuals on a GPU (base/feedback.h): around the kernels of a codec, which
// take float32. The forms are those of base/stored.h. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/residual_cuda.h"

// ---------------------------------------------------------------- kernels

namespace pycomm::codecs::stored {

/// Loads residuals to args.scales.
__global__ void __launch_bounds__(cuda::kThreads) load_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kSmall> tile = tile_of<kSmall>(args, args.scales);
  if (tile.empty()) return;
  cuda::Vector<float> value[kSmall];
  each_residual(tile, args, args.swapped != 0,
                [&](int row, const cuda::Vector<float>& residual) { value[row] = residual; });
  tile.store(args.scales, args.numel, value);
}

/// Stores what is in args.in.
__global__ void __launch_bounds__(cuda::kThreads) store_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kSmall> tile = tile_of<kSmall>(args);
  if (tile.empty()) return;
  cuda::Vector<float> value[kSmall];
  tile.load(args.in, value);
  store_residual(tile, args, value);
}

}  // namespace pycomm::codecs::stored

namespace pycomm::codecs {

PYCOMM_KERNELS(feedback, PYCOMM_KERNEL(stored::load_kernel), PYCOMM_KERNEL(stored::store_kernel));

}  // namespace pycomm::codecs

// Loading and storing of residuals on a GPU (base/feedback.h): around the kernels of a codec, which
// take float32. The forms are those of base/stored.h. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/residual_cuda.h"

// ---------------------------------------------------------------- kernels

namespace pycomm::codecs::stored {

__device__ __forceinline__ void decay(const LoadParams& args, cuda::Vector<float>& value) {
  if (args.decays == 0) return;
  for (int k = 0; k < cuda::kVector; k++) value.v[k] = args.decay * value.v[k];
}

template <typename Form>
__global__ void __launch_bounds__(cuda::kThreads) load_kernel(const Batch<LoadParams> batch) {
  const LoadParams args = tensor_of_block(batch);
  const auto* in = reinterpret_cast<const typename Form::Code*>(args.stored);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, in, args.out);
  if (tile.empty()) return;
  cuda::Vector<typename Form::Code> code[kRows];
  tile.load(in, code);
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) value[row].v[k] = Form::decode(code[row].v[k]);
    decay(args, value[row]);
  }
  tile.store(args.out, args.numel, value);
}

template <typename Form>
__global__ void __launch_bounds__(cuda::kThreads) store_kernel(const Batch<StoreParams> batch) {
  const StoreParams args = tensor_of_block(batch);
  auto* out = reinterpret_cast<typename Form::Code*>(args.stored);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.in, out);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
  tile.load(args.in, value);
  cuda::Vector<typename Form::Code> code[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) code[row].v[k] = Form::encode(value[row].v[k]);
  }
  tile.store(out, args.numel, code);
}

__global__ void __launch_bounds__(cuda::kThreads) load_blocks(const Batch<LoadParams> batch) {
  const LoadParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    value[row] = load_int8(args.stored, tile.index(row), args.numel);
    decay(args, value[row]);
  }
  tile.store(args.out, args.numel, value);
}

__global__ void __launch_bounds__(cuda::kThreads) store_blocks(const Batch<StoreParams> batch) {
  const StoreParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.in);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
  tile.load(args.in, value);  // beyond the end zeros, as the rest of a block is stored
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    store_int8(args.stored, tile.index(row), args.numel, value[row]);
  }
}

}  // namespace pycomm::codecs::stored

namespace pycomm::codecs {

PYCOMM_KERNELS(feedback, PYCOMM_KERNEL(stored::load_kernel<stored::Float32>),
               PYCOMM_KERNEL(stored::load_kernel<stored::BFloat16>),
               PYCOMM_KERNEL(stored::store_kernel<stored::Float32>),
               PYCOMM_KERNEL(stored::store_kernel<stored::BFloat16>),
               PYCOMM_KERNEL(stored::load_blocks), PYCOMM_KERNEL(stored::store_blocks));

}  // namespace pycomm::codecs

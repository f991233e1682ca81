// Loading and storing of residuals on a GPU (base/feedback.h): around the kernels of a codec, which
// take float32. The forms are those of base/stored.h. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/residual_cuda.h"

// ---------------------------------------------------------------- kernels

namespace pycomm::codecs::stored {

template <typename Form>
__global__ void __launch_bounds__(cuda::kThreads) load_kernel(const Batch<LoadParams> batch) {
  const LoadParams args = tensor_of_block(batch);
  using Code = typename Form::Code;
  const auto* in = Form::kBlocks ? nullptr : reinterpret_cast<const Code*>(args.stored);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, in, args.out);
  if (tile.empty()) return;
  cuda::Vector<Code> code[kRows];
  if (!Form::kBlocks) tile.load(in, code);
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    if constexpr (Form::kBlocks) {
      value[row] = load_int8(args.stored, tile.index(row), args.numel);
    } else {
      for (int k = 0; k < cuda::kVector; k++) value[row].v[k] = Form::decode(code[row].v[k]);
    }
    for (int k = 0; k < cuda::kVector; k++) value[row].v[k] = args.decay * value[row].v[k];
  }
  tile.store(args.out, args.numel, value);
}

template <typename Form>
__global__ void __launch_bounds__(cuda::kThreads) store_kernel(const Batch<StoreParams> batch) {
  const StoreParams args = tensor_of_block(batch);
  using Code = typename Form::Code;
  auto* out = Form::kBlocks ? nullptr : reinterpret_cast<Code*>(args.stored);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.in, out);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
  tile.load(args.in, value);  // beyond the end zeros, as the rest of a block is stored
  cuda::Vector<Code> code[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    if constexpr (Form::kBlocks) {
      store_int8(args.stored, tile.index(row), args.numel, value[row]);
    } else {
      for (int k = 0; k < cuda::kVector; k++) code[row].v[k] = Form::encode(value[row].v[k]);
    }
  }
  if (!Form::kBlocks) tile.store(out, args.numel, code);
}

}  // namespace pycomm::codecs::stored

namespace pycomm::codecs {

#define FORM(Form)                                  \
  PYCOMM_KERNEL(stored::load_kernel<stored::Form>), \
      PYCOMM_KERNEL(stored::store_kernel<stored::Form>)
PYCOMM_KERNELS(feedback, FORM(Float32), FORM(Int8));
#undef FORM

}  // namespace pycomm::codecs

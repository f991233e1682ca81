// Conversion of gradients on the GPU (convert.h): a warp takes a tile of rows, reads them once and
// writes them once. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/warp_cuda.h"
#include "codecs/convert.h"

// ---------------------------------------------------------------- kernels

namespace pycomm::codecs::convert {

template <typename From, typename To>
__global__ void __launch_bounds__(cuda::kThreads) convert_kernel(const Batch<Params> batch) {
  const Params args = tensor_of_block(batch);
  const auto* in = static_cast<const typename From::Code*>(args.in);
  auto* out = static_cast<typename To::Code*>(args.out);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, in, out);
  if (tile.empty()) return;

  cuda::Vector<typename From::Code> code[kRows];
  tile.load(in, code);
  const float by = args.by.get(), clip = args.clip.get();
  cuda::Vector<typename To::Code> result[kRows];
  bool fine = true;
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const float value = scaled(From::decode(code[row].v[k]), by, clip, args.divisor);
      result[row].v[k] = To::encode(value);
      // Values beyond the end were read as zeros; times an infinite factor they are not finite.
      const bool there = tile.index(row) + k < args.numel;
      fine &= is_finite(To::decode(result[row].v[k])) || !there;
    }
  }
  tile.store(out, args.numel, result);
  if (!fine && args.found_inf) *args.found_inf = 1.0f;  // all writers write the same value
}

}  // namespace pycomm::codecs::convert

namespace pycomm::codecs {

#define FROM(From)                                                 \
  PYCOMM_KERNEL(convert::convert_kernel<From, cast::Float32>),     \
      PYCOMM_KERNEL(convert::convert_kernel<From, cast::Float16>), \
      PYCOMM_KERNEL(convert::convert_kernel<From, cast::BFloat16>)
PYCOMM_KERNELS(convert, FROM(cast::Float32), FROM(cast::Float16), FROM(cast::BFloat16));
#undef FROM

}  // namespace pycomm::codecs

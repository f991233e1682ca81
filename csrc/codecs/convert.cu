// Conversion of gradients on the GPU (convert.h): a warp takes a tile of rows, reads them once and
// writes them once. Compiled by nvcc and NVRTC.
#include "codecs/convert.h"
#include "core/cuda_vector.h"

// ---------------------------------------------------------------- kernels

namespace pycomm::codecs::convert {

constexpr int kRows = 4;

template <typename From, typename To>
__global__ void __launch_bounds__(cuda::kThreads) convert_kernel(const Params args) {
  const auto* in = static_cast<const typename From::Code*>(args.in);
  auto* out = static_cast<typename To::Code*>(args.out);
  const cuda::Tile<kRows> tile(args.numel, in, out);
  if (tile.empty()) return;

  cuda::Vector<typename From::Code> code[kRows];
  tile.load(in, code);
  const float by = args.by_at ? *args.by_at : args.by;
  const float clip = args.clip_at ? *args.clip_at : args.clip;
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

// -------------------------------------------------------------- launchers

#ifndef __CUDACC_RTC__
#include "codecs/cuda_convert.h"
#include "core/cuda_launch.h"

namespace pycomm::codecs::convert {
namespace {

template <typename From>
void load_from() {
  const auto load = [](auto kernel) {
    cudaFuncAttributes about{};
    if (cudaFuncGetAttributes(&about, kernel) == cudaSuccess) return;
    cudaGetLastError();  // clears the error for the next launch
    throw Error("convert: cuda cannot load its kernels");
  };
  load(convert_kernel<From, cast::Float32>);
  load(convert_kernel<From, cast::Float16>);
  load(convert_kernel<From, cast::BFloat16>);
}

template <typename From>
void launch_from(DType to, const Params& params, Stream stream) {
  const auto start = [&](auto kernel) {
    cuda::launch("convert", kernel, params, params.numel, kRows * cuda::kRow, stream);
  };
  switch (to) {
    case DType::float16:
      return start(convert_kernel<From, cast::Float16>);
    case DType::bfloat16:
      return start(convert_kernel<From, cast::BFloat16>);
    default:
      return start(convert_kernel<From, cast::Float32>);
  }
}

}  // namespace

void load_convert() {
  load_from<cast::Float32>();
  load_from<cast::Float16>();
  load_from<cast::BFloat16>();
}

void convert_cuda(const ConvertArgs& args) {
  Params params{};
  params.in = args.in;
  params.out = args.out;
  params.numel = args.numel;
  params.by_at = args.by.at;
  params.clip_at = args.clip.at;
  params.found_inf = args.found_inf;
  params.by = args.by.value;
  params.clip = args.clip.value;
  params.divisor = args.divisor;
  switch (args.from) {
    case DType::float16:
      return launch_from<cast::Float16>(args.to, params, args.stream);
    case DType::bfloat16:
      return launch_from<cast::BFloat16>(args.to, params, args.stream);
    default:
      return launch_from<cast::Float32>(args.to, params, args.stream);
  }
}

}  // namespace pycomm::codecs::convert
#endif

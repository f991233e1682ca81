// Loading and storing of residuals on a GPU (base/feedback.h): around the kernels of a codec, which
// take float32. The forms are those of base/stored.h. Compiled by nvcc and NVRTC.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/stored.h"
#include "codecs/base/warp_cuda.h"

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

/// Lanes that have the values of one block.
constexpr int kLanesOfBlock = kBlock / cuda::kVector;

/// Four codes, as they are stored.
union Codes {
  uint32_t word;
  int8_t code[cuda::kVector];
};

__global__ void __launch_bounds__(cuda::kThreads) load_blocks(const Batch<LoadParams> batch) {
  const LoadParams args = tensor_of_block(batch);
  const cuda::Tile<kRows> tile(block_of(args), args.numel, args.out);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    const size_t i = tile.index(row);
    Codes codes{0};
    float scale = 0.0f;
    if (i < args.numel) {
      const uint8_t* const block = args.stored + i / kBlock * kBlockBytes;
      scale = *reinterpret_cast<const float*>(block);
      codes.word = *reinterpret_cast<const uint32_t*>(block + sizeof(float) + i % kBlock);
    }
    for (int k = 0; k < cuda::kVector; k++) value[row].v[k] = value_of(codes.code[k], scale);
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
    uint32_t top = 0;
    for (int k = 0; k < cuda::kVector; k++) top = max(top, magnitude_bits(value[row].v[k]));
#pragma unroll
    for (int lane = 1; lane < kLanesOfBlock; lane *= 2) {
      top = max(top, __shfl_xor_sync(~0u, top, lane));
    }
    const float amax = bits_float(top), inv = inv_scale(amax, kTop);
    Codes codes{0};
    if (used(amax)) {
      for (int k = 0; k < cuda::kVector; k++) codes.code[k] = code_of(value[row].v[k], inv);
    }
    const size_t i = tile.index(row);
    if (i / kBlock * kBlock >= args.numel) continue;
    uint8_t* const block = args.stored + i / kBlock * kBlockBytes;
    if (i % kBlock == 0) *reinterpret_cast<float*>(block) = scale_of(amax);
    *reinterpret_cast<uint32_t*>(block + sizeof(float) + i % kBlock) = codes.word;
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

// toy in CUDA.
#include "codecs/base/block_cuda.h"
#include "codecs/base/kernels_cuda.h"
#include "codecs/toy.h"

namespace pycomm::codecs::toy {

template <bool kFeedback>
__global__ void __launch_bounds__(cuda::kThreads) encode_kernel(const Batch<EncodeParams> batch) {
  const EncodeParams args = tensor_of_block(batch);
  const cuda::Tile<kSmall> tile = tile_of<kSmall>(args);
  if (tile.empty()) return;
  cuda::Vector<float> p[kSmall], kept[kSmall];
  tile.load(args.in, p);
  cuda::Vector<uint16_t> code[kSmall];
  for (int row = 0; row < kSmall; row++) {
    if (kFeedback) kept[row] = load_residual(tile, args, row);
    for (int k = 0; k < cuda::kVector; k++) {
      if (kFeedback) p[row].v[k] = p[row].v[k] + kept[row].v[k];
      const bool there = tile.index(row) + k < args.numel;
      code[row].v[k] = there ? encode(p[row].v[k]) : uint16_t{0};
      if (kFeedback) {
        p[row].v[k] = residual_of(p[row].v[k], decode(code[row].v[k]), kept[row].v[k]);
      }
    }
  }
  // Codes are padded with zeros to a multiple of four bytes.
  tile.store(reinterpret_cast<uint16_t*>(args.codes), (args.numel + 1) / 2 * 2, code);
  if (kFeedback) store_residual(tile, args, p);
}

template <bool kAdd>
__global__ void __launch_bounds__(cuda::kThreads) decode_kernel(const Batch<DecodeParams> batch) {
  const DecodeParams args = tensor_of_block(batch);
  const auto* codes = reinterpret_cast<const uint16_t*>(args.codes);
  const cuda::Tile<kSmall> tile(block_of(args), args.numel, codes, args.out);
  if (tile.empty()) return;
  cuda::Vector<uint16_t> code[kSmall];
  cuda::Vector<float> value[kSmall];
  tile.load(codes, code);
  if (kAdd) tile.load(args.out, value);
  for (int row = 0; row < kSmall; row++) {
    for (int k = 0; k < cuda::kVector; k++) {
      const float decoded = decode(code[row].v[k]);
      value[row].v[k] = kAdd ? value[row].v[k] + decoded : decoded;
    }
  }
  tile.store(args.out, args.numel, value);
}

}  // namespace pycomm::codecs::toy

namespace pycomm::codecs {

PYCOMM_KERNELS(toy, PYCOMM_KERNEL(toy::encode_kernel<false>),
               PYCOMM_KERNEL(toy::encode_kernel<true>), PYCOMM_KERNEL(toy::decode_kernel<false>),
               PYCOMM_KERNEL(toy::decode_kernel<true>));

}  // namespace pycomm::codecs

// Kernels of the 16- and 8-bit floats: decoded to float32, folded, rounded once.
#include <algorithm>

#include "core/float16.h"
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

// Folds through float32 copies in the first-level cache, since the processor converts whole arrays
// best.
void fold_float16(const Block& block) {
  constexpr size_t kScratch = kMaxInputs;
  const auto count = static_cast<size_t>(block.count);
  alignas(64) float scratch[kScratch];
  const void* decoded[kMaxInputs];
  const size_t step = std::min(kBlock, kScratch / count);
  for (size_t begin = 0; begin < block.numel; begin += step) {
    const size_t n = std::min(step, block.numel - begin);
    const size_t offset = block.offset + begin * sizeof(uint16_t);
    for (size_t j = 0; j < count; j++) {
      const auto* in = static_cast<const char*>(block.inputs[j]) + offset;
      decode_float16(reinterpret_cast<const uint16_t*>(in), scratch + j * step, n);
      decoded[j] = scratch + j * step;
    }
    Block wide = block;
    wide.inputs = decoded;
    wide.offset = 0;
    wide.out = scratch;
    wide.numel = n;
    fold_float32(wide);
    encode_float16(scratch, static_cast<uint16_t*>(block.out) + begin, n);
  }
}

PYCOMM_SIMD void fold_bfloat16(const Block& block) {
  fold_float<SmallFloat<pycomm::BFloat16, uint16_t>>(block);
}
PYCOMM_SIMD void fold_float8_e4m3(const Block& block) {
  fold_float<SmallFloat<pycomm::Float8E4M3, uint8_t>>(block);
}
PYCOMM_SIMD void fold_float8_e5m2(const Block& block) {
  fold_float<SmallFloat<pycomm::Float8E5M2, uint8_t>>(block);
}

}  // namespace pycomm::kernels

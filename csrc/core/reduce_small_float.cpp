// Kernels of the 16- and 8-bit floats: decoded to float32, folded, rounded once.
#include <algorithm>

#include "core/float16.h"
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

namespace {

/// Folds through float32 copies in the first-level cache: for types whose conversion is long, since
/// it is then compiled once, not for each op, and whole arrays are what the processor converts
/// best.
template <typename Code, typename Decode, typename Encode>
void fold_converted(const Block& block, const Decode& decode, const Encode& encode) {
  constexpr size_t kScratch = kMaxInputs;
  const auto count = static_cast<size_t>(block.count);
  alignas(64) float scratch[kScratch];
  const void* decoded[kMaxInputs];
  const size_t step = std::min(kBlock, kScratch / count);
  for (size_t begin = 0; begin < block.numel; begin += step) {
    const size_t n = std::min(step, block.numel - begin);
    const size_t offset = block.offset + begin * sizeof(Code);
    for (size_t j = 0; j < count; j++) {
      const auto* in = static_cast<const char*>(block.inputs[j]) + offset;
      decode(reinterpret_cast<const Code*>(in), scratch + j * step, n);
      decoded[j] = scratch + j * step;
    }
    Block wide = block;
    wide.inputs = decoded;
    wide.offset = 0;
    wide.out = scratch;
    wide.numel = n;
    fold_float32(wide);
    encode(scratch, static_cast<Code*>(block.out) + begin, n);
  }
}

template <typename Type>
PYCOMM_INLINE void decode_all(const uint8_t* in, float* out, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = Type::load(in[i]);
}

template <typename Type>
PYCOMM_INLINE void encode_all(const float* in, uint8_t* out, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = Type::store(in[i]);
}

using E4M3 = StoredFloat<pycomm::Float8E4M3, uint8_t>;
using E5M2 = StoredFloat<pycomm::Float8E5M2, uint8_t>;

PYCOMM_SIMD void decode_e4m3(const uint8_t* in, float* out, size_t n) {
  decode_all<E4M3>(in, out, n);
}
PYCOMM_SIMD void encode_e4m3(const float* in, uint8_t* out, size_t n) {
  encode_all<E4M3>(in, out, n);
}
PYCOMM_SIMD void decode_e5m2(const uint8_t* in, float* out, size_t n) {
  decode_all<E5M2>(in, out, n);
}
PYCOMM_SIMD void encode_e5m2(const float* in, uint8_t* out, size_t n) {
  encode_all<E5M2>(in, out, n);
}

}  // namespace

void fold_float16(const Block& block) {
  fold_converted<uint16_t>(block, decode_float16, encode_float16);
}
void fold_float8_e4m3(const Block& block) {
  fold_converted<uint8_t>(block, decode_e4m3, encode_e4m3);
}
void fold_float8_e5m2(const Block& block) {
  fold_converted<uint8_t>(block, decode_e5m2, encode_e5m2);
}
PYCOMM_SIMD void fold_bfloat16(const Block& block) {
  fold_numbers<StoredFloat<pycomm::BFloat16, uint16_t>>(block);
}

}  // namespace pycomm::kernels

// toy: the upper half of each float32. Wire format: docs/wire/toy.md.
#pragma once
#include "codecs/base/block.h"
#include "core/types.h"

namespace pycomm::codecs::toy {

PYCOMM_HD size_t encoded_bytes(size_t numel) { return padded(2 * numel); }

PYCOMM_HD uint16_t encode(float p) {
  return magnitude_bits(p) > kInfBits ? uint16_t{0x7fc0}
                                      : static_cast<uint16_t>(float_bits(p) >> 16);
}
PYCOMM_HD float decode(uint16_t code) { return bits_float(uint32_t{code} << 16); }

}  // namespace pycomm::codecs::toy

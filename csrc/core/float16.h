// Conversion of arrays of float16 to and from float32, by the processor's instruction (F16C) where
// it has one: three times the speed of floats.h, and the same bits except those of NaN.
#pragma once
#include "core/types.h"

namespace pycomm {

PYCOMM_API void decode_float16(const uint16_t* in, float* out, size_t n);
PYCOMM_API void encode_float16(const float* in, uint16_t* out, size_t n);

}  // namespace pycomm

// CUDA parts of the codecs, on the stream of the call: <name>.cu, or no_cuda.cpp in a build without
// CUDA, where each function throws Error. CMake picks one; no other source depends on what was
// built.
#pragma once
#include "codecs/base/codec.h"
#include "codecs/cast.h"
#include "codecs/eden.h"
#include "codecs/mx.h"
#include "codecs/planar.h"
#include "codecs/quant.h"
#include "codecs/randomk.h"
#include "codecs/ternary.h"

namespace pycomm::codecs {

PYCOMM_API bool cuda_built();

// Callers check the arguments (cast.cpp and the like). `add`: out = out + decode(payload).

namespace cast {
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace cast

namespace eden {
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace eden

namespace lossless {
void encode_cuda(bool wide, const EncodeArgs& args);
void decode_cuda(bool wide, Span<const uint8_t> payload, Span<float> out, bool add, Stream stream);
}  // namespace lossless

namespace mx {
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace mx

namespace quant {
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace quant

namespace randomk {
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace randomk

/// A rotation has 1 << size_bits values.
namespace rotate {
void encode_cuda(int size_bits, const PlanarFormat& inner, const EncodeArgs& args);
void decode_cuda(int size_bits, const PlanarFormat& inner, Span<const uint8_t> payload,
                 Span<float> out, bool add, Stream stream);
}  // namespace rotate

namespace sign {
void encode_cuda(uint32_t block, const EncodeArgs& args);
void decode_cuda(uint32_t block, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace sign

namespace ternary {
void measure_cuda(const Format& format, Span<const float> in, const float* residual, float* out,
                  Stream stream);
void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);
}  // namespace ternary

}  // namespace pycomm::codecs

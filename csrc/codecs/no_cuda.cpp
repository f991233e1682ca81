// CUDA parts of the codecs in a build without CUDA.
#include "codecs/cuda.h"
#include "codecs/cuda_convert.h"
#include "codecs/topk/cuda.h"
#include "core/error.h"

namespace pycomm::codecs {
namespace {

[[noreturn]] void fail() {
  throw Error("codecs on cuda: this pycomm was built without CUDA; build it where nvcc is found");
}

}  // namespace

bool cuda_built() { return false; }

namespace cast {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace cast

namespace eden {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace eden

namespace lossless {
void encode_cuda(bool, const EncodeArgs&) { fail(); }
void decode_cuda(bool, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace lossless

namespace mx {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace mx

namespace quant {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace quant

namespace randomk {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace randomk

namespace rotate {
void encode_cuda(int, const PlanarFormat&, const EncodeArgs&) { fail(); }
void decode_cuda(int, const PlanarFormat&, Span<const uint8_t>, Span<float>, bool, Stream) {
  fail();
}
}  // namespace rotate

namespace sign {
void encode_cuda(uint32_t, const EncodeArgs&) { fail(); }
void decode_cuda(uint32_t, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace sign

namespace ternary {
void measure_cuda(const Format&, Span<const float>, const float*, float*, Stream) { fail(); }
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace ternary

namespace topk {
void encode_cuda(const Format&, const EncodeArgs&) { fail(); }
void decode_cuda(const Format&, Span<const uint8_t>, Span<float>, bool, Stream) { fail(); }
}  // namespace topk

namespace convert {
void convert_cuda(const ConvertArgs&) { fail(); }
void load_convert() { fail(); }
}  // namespace convert

}  // namespace pycomm::codecs

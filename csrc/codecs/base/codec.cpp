// Argument checks that all codecs share, and the choice of the processor.
#include "codecs/base/codec.h"

#include "core/error.h"

namespace pycomm {
namespace {

/// Checks the bytes of a payload, and the scratch memory, of a call on `numel` values.
void check_call(const Codec& codec, const char* role, size_t bytes, size_t numel,
                const Stream& stream) {
  const size_t want = codec.encoded_bytes(numel);
  if (bytes != want) {
    throw Error(codec.spec() + ": " + role + " has " + std::to_string(bytes) + " bytes, but " +
                std::to_string(numel) + " values take " + std::to_string(want));
  }
  if (codec.variable() && want > UINT32_MAX) {
    throw Error(codec.spec() + ": a payload counts its bytes in 32 bits; cut the tensor");
  }
  const size_t scratch = codec.scratch_bytes(numel);
  if (stream.device != Device::cuda || stream.scratch.size >= scratch) return;
  throw Error(codec.spec() + ": the stream has " + std::to_string(stream.scratch.size) +
              " bytes of scratch memory, but " + std::to_string(numel) + " values need " +
              std::to_string(scratch) + "; ask scratch_bytes()");
}

}  // namespace

void Codec::encode(const EncodeArgs& args) const {
  check_call(*this, "out", args.out.size, args.in.size, args.stream);
  if ((args.residual.old == nullptr) != (args.residual.fresh == nullptr) && args.in.size > 0) {
    throw Error(spec() + ": one of residual and new_residual is null; give both or neither");
  }
  if (granule() == 0 && args.index != 0) {
    throw Error(spec() + ": index " + std::to_string(args.index) +
                ", but it takes whole tensors only");
  }
  if (granule() != 0 && args.index % granule() != 0) {
    throw Error(spec() + ": index " + std::to_string(args.index) + " is not a multiple of " +
                std::to_string(granule()) + ", where tensors may be cut");
  }
  if (args.in.size == 0) return;
  args.stream.device == Device::cuda ? encode_cuda(args) : encode_cpu(args);
}

void Codec::decode(Span<const uint8_t> payload, Span<float> out, Stream stream, bool add) const {
  check_call(*this, "payload", payload.size, out.size, stream);
  if (out.size == 0) return;
  stream.device == Device::cuda ? decode_cuda(payload, out, add, stream)
                                : decode_cpu(payload, out, add);
}

}  // namespace pycomm

// Argument checks that all codecs share.
#include "codecs/base/loops.h"
#include "core/error.h"

namespace pycomm::codecs {
namespace {

void check_size(const Codec& codec, const char* role, size_t bytes, size_t numel) {
  const size_t want = codec.encoded_bytes(numel);
  if (bytes == want) return;
  throw Error(codec.spec() + ": " + role + " has " + std::to_string(bytes) + " bytes, but " +
              std::to_string(numel) + " values take " + std::to_string(want));
}

}  // namespace

void check_encode(const Codec& codec, const EncodeArgs& args) {
  check_size(codec, "out", args.out.size, args.in.size);
  if ((args.residual == nullptr) != (args.new_residual == nullptr) && args.in.size > 0) {
    throw Error(codec.spec() + ": one of residual and new_residual is null; give both or neither");
  }
  if (codec.granule() == 0 && args.index != 0) {
    throw Error(codec.spec() + ": index " + std::to_string(args.index) +
                ", but it takes whole tensors only");
  }
  if (codec.granule() != 0 && args.index % codec.granule() != 0) {
    throw Error(codec.spec() + ": index " + std::to_string(args.index) + " is not a multiple of " +
                std::to_string(codec.granule()) + ", where tensors may be cut");
  }
}

void check_decode(const Codec& codec, Span<const uint8_t> payload, Span<float> out) {
  check_size(codec, "payload", payload.size, out.size);
}

void check_scratch(const Codec& codec, size_t numel, const Stream& stream) {
  const size_t want = codec.scratch_bytes(numel);
  if (stream.device != Device::cuda || stream.scratch.size >= want) return;
  throw Error(codec.spec() + ": the stream has " + std::to_string(stream.scratch.size) +
              " bytes of scratch memory, but " + std::to_string(numel) + " values need " +
              std::to_string(want) + "; ask scratch_bytes()");
}

}  // namespace pycomm::codecs

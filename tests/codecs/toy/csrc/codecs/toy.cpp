// toy on the CPU, and its launches.
#include "codecs/toy.h"

#include "codecs/base/block_launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/options.h"

namespace pycomm::codecs::toy {
namespace {

class Toy final : public Codec {
 public:
  std::string_view name() const override { return "toy"; }
  std::string spec() const override { return "toy"; }
  bool takes_stored(Device device) const override { return device == Device::cuda; }
  int wire_version() const override { return 1; }
  size_t granule() const override { return 2; }
  size_t encoded_bytes(size_t numel) const override { return toy::encoded_bytes(numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    auto* codes = reinterpret_cast<uint16_t*>(args.out.data);
    const float* const residual = args.residual.floats();
    float* const fresh = args.residual.fresh_floats();
    for (size_t i = 0; i < args.in.size; i++) {
      const float before = residual ? residual[i] : 0.0f;
      const float p = residual ? args.in[i] + before : args.in[i];
      codes[i] = toy::encode(p);
      if (residual) fresh[i] = residual_of(p, toy::decode(codes[i]), before);
    }
    zero_padding(args.out, 2 * args.in.size);
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    const auto* codes = reinterpret_cast<const uint16_t*>(payload.data);
    for (size_t i = 0; i < out.size; i++) {
      const float value = toy::decode(codes[i]);
      out[i] = add ? out[i] + value : value;
    }
  }
  void encode_cuda(const EncodeArgs& args) const override {
    launch("toy", kernel_name("toy::encode_kernel", args.has_residual()), encode_params(1, 0, args),
           args.in.size, kSmall * cuda::kRow, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    launch("toy", kernel_name("toy::decode_kernel", add), decode_params(1, 0, payload, out),
           out.size, kSmall * cuda::kRow, stream);
  }
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  options.finish();
  return std::make_unique<Toy>();
}

}  // namespace pycomm::codecs::toy

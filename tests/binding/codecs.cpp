// Minimal codecs of every kind that csrc/codecs/base/codec.h allows, for tests of the collectives.
// A value is an integer times an eighth, so sums are exact.
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "codecs/base/codec.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

constexpr float kUnit = 0.125f;

/// A value of a payload of variable size.
struct Code {
  uint32_t index;
  int32_t code;
};

class Simple final : public Codec {
 public:
  Simple(Combine combine, size_t granule, bool variable, bool lies, int rests)
      : combine_(combine), granule_(granule), variable_(variable), lies_(lies), rests_(rests) {}

  std::string_view name() const override { return "simple"; }
  std::string spec() const override { return "simple"; }
  Combine combine() const override { return combine_; }
  int wire_version() const override { return 1; }
  size_t granule() const override { return granule_; }
  bool variable() const override { return variable_; }
  size_t encoded_bytes(size_t numel) const override {
    return variable_ && numel > 0 ? kHead + numel * sizeof(Code) : numel * sizeof(int32_t);
  }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    if (rests_.count() > 0) std::this_thread::sleep_for(rests_);
    auto* pair = reinterpret_cast<Code*>(args.out.data + kHead);
    auto* code = reinterpret_cast<int32_t*>(args.out.data);
    const float* const residual = args.residual.floats();
    for (size_t i = 0; i < args.in.size; i++) {
      const float p = args.in[i] + (residual ? residual[i] : 0.0f);
      const auto q = static_cast<int32_t>(std::nearbyint(p / kUnit));
      if (residual) args.residual.fresh_floats()[i] = p - static_cast<float>(q) * kUnit;
      if (!variable_) {
        *code++ = q;
      } else if (q != 0) {
        *pair++ = {static_cast<uint32_t>(i), q};
      }
    }
    if (!variable_) return;
    auto used = static_cast<uint32_t>(reinterpret_cast<uint8_t*>(pair) - args.out.data);
    if (lies_) used = 6;
    std::memcpy(args.out.data, &used, 4);
  }

  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool sums) const override {
    if (!sums) std::fill(out.begin(), out.end(), 0.0f);
    const auto add = [&](size_t i, int32_t code) { out[i] += static_cast<float>(code) * kUnit; };
    const uint8_t* in = payload.data;
    if (!variable_) {
      const auto* code = reinterpret_cast<const int32_t*>(in);
      for (size_t i = 0; i < out.size; i++) add(i, code[i]);
      return;
    }
    uint32_t used = 0;
    std::memcpy(&used, in, sizeof used);
    const auto* pair = reinterpret_cast<const Code*>(in + kHead);
    for (; reinterpret_cast<const uint8_t*>(pair) < in + used; pair++) {
      if (pair->index < out.size) add(pair->index, pair->code);
    }
  }
  void encode_cuda(const EncodeArgs&) const override {}
  void decode_cuda(Span<const uint8_t>, Span<float>, bool, const Stream&) const override {}

  static constexpr size_t kHead = 4;  // of a payload of variable size: the bytes that it uses

  Combine combine_;
  size_t granule_;
  bool variable_, lies_;
  std::chrono::milliseconds rests_;  // at each encode
};

}  // namespace

void bind_codecs(py::module_& m) {
  py::class_<Simple, Codec>(m, "Simple")
      .def(py::init(
               [](const std::string& combine, size_t granule, bool variable, bool lies, int rests) {
                 const Combine how = combine == "gather" ? Combine::gather : Combine::recode;
                 return new Simple(how, granule, variable, lies, rests);
               }),
           py::arg("combine"), py::kw_only(), py::arg("granule") = 64, py::arg("variable") = false,
           py::arg("lies") = false, py::arg("rests") = 0);
}

}  // namespace pycomm

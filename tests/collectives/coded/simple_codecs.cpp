// Minimal codecs of every kind that csrc/codecs/base/codec.h allows, for tests of the collectives.
// A value is an integer times its granule's power of two, so sums are exact.
#include <pybind11/pybind11.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#include "codecs/base/codec.h"
#include "core/error.h"

namespace py = pybind11;
using namespace pycomm;

namespace {

constexpr float kSteps = 8.0f;  // of the scale

struct Pair {
  uint32_t index;
  int32_t code;
};

/// The keys of all encoder calls: seed, rank and number of ranks.
std::mutex keys_mutex;
std::set<std::tuple<uint64_t, uint32_t, uint32_t>> keys;

class Simple final : public Codec {
 public:
  Simple(Combine combine, size_t granule, bool variable, bool needs_amax, bool shared_seed, bool lies,
         int rests)
      : combine_(combine),
        granule_(granule),
        variable_(variable),
        needs_amax_(needs_amax),
        shared_seed_(shared_seed),
        lies_(lies),
        rests_(rests) {}

  std::string_view name() const override { return "simple"; }
  std::string spec() const override { return "simple"; }
  Combine combine() const override { return combine_; }
  int wire_version() const override { return 1; }
  size_t granule() const override { return granule_; }
  bool variable() const override { return variable_; }
  bool needs_amax() const override { return needs_amax_; }
  bool shared_seed() const override { return shared_seed_; }
  size_t encoded_bytes(size_t numel) const override {
    return head(numel) + numel * (variable_ ? sizeof(Pair) : sizeof(int32_t));
  }

  // The maximum of powers of two is also a power of two.
  void compute_amax(Span<const float> in, const float* residual, Span<float> out,
               Stream) const override {
    for (size_t g = 0; g < out.size; g++) {
      float most = 0.0f;
      for (size_t i = g * width(in.size); i < std::min(in.size, (g + 1) * width(in.size)); i++) {
        most = std::max(most, std::abs(in[i] + (residual ? residual[i] : 0.0f)));
      }
      out[g] = most > 0.0f ? std::exp2(std::ceil(std::log2(most))) : 1.0f;
    }
  }

  void encode(const EncodeArgs& args) const override {
    if (rests_.count() > 0) std::this_thread::sleep_for(rests_);
    {
      const std::lock_guard<std::mutex> lock(keys_mutex);
      keys.insert({args.key.seed, args.key.rank, args.key.ranks});
    }
    const size_t numel = args.in.size;
    auto* scales = reinterpret_cast<float*>(args.out.data + (variable_ ? 4 : 0));
    for (size_t g = 0; g < granules(numel); g++) scales[g] = needs_amax_ ? args.amax[g] : 1.0f;
    auto* pair = reinterpret_cast<Pair*>(args.out.data + head(numel));
    auto* code = reinterpret_cast<int32_t*>(args.out.data + head(numel));
    for (size_t i = 0; i < numel; i++) {
      const float unit = scales[i / width(numel)] / kSteps;
      const float p = args.in[i] + (args.residual ? args.residual[i] : 0.0f);
      const auto q = static_cast<int32_t>(std::nearbyint(p / unit));
      if (args.residual) args.new_residual[i] = p - static_cast<float>(q) * unit;
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

  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    std::fill(out.begin(), out.end(), 0.0f);
    decode_add(payload, out, stream);
  }

  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream) const override {
    const uint8_t* in = payload.data;
    uint32_t used = 0;
    if (variable_) std::memcpy(&used, in, 4);
    const auto* scales = reinterpret_cast<const float*>(in + (variable_ ? 4 : 0));
    const auto add = [&](size_t i, int32_t code) {
      out[i] += static_cast<float>(code) * (scales[i / width(out.size)] / kSteps);
    };
    const auto* code = reinterpret_cast<const int32_t*>(in + head(out.size));
    for (size_t i = 0; !variable_ && i < out.size; i++) add(i, code[i]);
    const auto* pair = reinterpret_cast<const Pair*>(in + head(out.size));
    for (; reinterpret_cast<const uint8_t*>(pair) < in + used; pair++) {
      if (pair->index < out.size) add(pair->index, pair->code);
    }
  }

 private:
  size_t width(size_t numel) const { return granule_ ? granule_ : std::max<size_t>(1, numel); }
  size_t granules(size_t numel) const { return (numel + width(numel) - 1) / width(numel); }
  size_t head(size_t numel) const { return (variable_ ? 4 : 0) + granules(numel) * 4; }

  Combine combine_;
  size_t granule_;
  bool variable_, needs_amax_, shared_seed_, lies_;
  std::chrono::milliseconds rests_;  // at each encode
};

}  // namespace

PYBIND11_MODULE(simple_codecs, m) {
  py::module_::import("pycomm._C");
  py::class_<Simple, Codec>(m, "Simple")
      .def(py::init([](const std::string& combine, size_t granule, bool variable, bool needs_amax,
                       bool shared_seed, bool lies, int rests) {
             const Combine how = combine == "sum"      ? Combine::sum
                                 : combine == "gather" ? Combine::gather
                                                       : Combine::recode;
             return new Simple(how, granule, variable, needs_amax, shared_seed, lies, rests);
           }),
           py::arg("combine"), py::kw_only(), py::arg("granule") = 64, py::arg("variable") = false,
           py::arg("needs_amax") = false, py::arg("shared_seed") = false, py::arg("lies") = false,
           py::arg("rests") = 0);
  m.def("take_keys", [] {
    const std::lock_guard<std::mutex> lock(keys_mutex);
    py::list taken;
    for (const auto& [seed, rank, ranks] : keys) taken.append(py::make_tuple(seed, rank, ranks));
    keys.clear();
    return taken;
  });
}

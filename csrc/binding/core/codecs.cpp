// Codecs for Python: pycomm.codecs.base checks and owns the tensors, and only addresses come here.
#include <pybind11/stl.h>

#include <optional>

#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "codecs/base/codec.h"
#include "codecs/base/feedback.h"
#include "codecs/base/launch.h"
#include "codecs/convert.h"
#include "core/arithmetic.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// Converts a stream: None is the CPU, a number is a cudaStream_t. `scratch`: memory on cuda.
Stream to_stream(std::optional<uintptr_t> handle, uintptr_t scratch, size_t bytes) {
  if (!handle) return {};
  return {Device::cuda,
          reinterpret_cast<void*>(*handle),
          {reinterpret_cast<uint8_t*>(scratch), scratch ? bytes : 0}};
}

/// Addresses of a residual, and of the new one.
using Sides = std::pair<uintptr_t, uintptr_t>;

feedback::Memory memory(const Sides& addresses) {
  return {reinterpret_cast<const uint8_t*>(addresses.first),
          reinterpret_cast<uint8_t*>(addresses.second)};
}

void encode(const Codec& codec, uintptr_t x, size_t numel, uintptr_t out, const Sides& error,
            const Sides& momentum, feedback::Kind kind, feedback::Storage storage, double decay,
            uint64_t seed, uint32_t step, uint32_t tensor, uint64_t index,
            std::optional<uintptr_t> stream, uintptr_t scratch) {
  const DefaultArithmetic arithmetic;
  GilReleased release;
  const feedback::Feedback feedback{kind, storage, static_cast<float>(decay), memory(error),
                                    memory(momentum)};
  EncodeArgs args;
  args.in = {reinterpret_cast<const float*>(x), numel};
  args.out = {reinterpret_cast<uint8_t*>(out), codec.encoded_bytes(numel)};
  args.key = {seed, step, tensor};
  args.index = index;
  args.stream =
      to_stream(stream, scratch,
                feedback::scratch_bytes(codec, feedback, numel) + codec.scratch_bytes(numel));
  feedback::Scratch passes;
  feedback::encode(codec, feedback, args, passes);
}

template <bool kAdd>
void decode(const Codec& codec, uintptr_t payload, uintptr_t out, size_t numel,
            std::optional<uintptr_t> stream, uintptr_t scratch) {
  const DefaultArithmetic arithmetic;
  GilReleased release;
  codec.decode({reinterpret_cast<const uint8_t*>(payload), codec.encoded_bytes(numel)},
               {reinterpret_cast<float*>(out), numel},
               to_stream(stream, scratch, codec.scratch_bytes(numel)), kAdd);
}

void convert_addresses(uintptr_t in, DType from, uintptr_t out, DType to, size_t numel,
                       std::pair<uintptr_t, double> by, std::pair<uintptr_t, double> clip,
                       double divisor, uintptr_t found_inf, std::optional<uintptr_t> stream) {
  const DefaultArithmetic arithmetic;
  ConvertArgs args;
  args.in = reinterpret_cast<const void*>(in);
  args.out = reinterpret_cast<void*>(out);
  args.numel = numel;
  args.from = from;
  args.to = to;
  args.by = {reinterpret_cast<const float*>(by.first), static_cast<float>(by.second)};
  args.clip = {reinterpret_cast<const float*>(clip.first), static_cast<float>(clip.second)};
  args.divisor = static_cast<float>(divisor);
  args.found_inf = reinterpret_cast<float*>(found_inf);
  if (stream) args.stream = {Device::cuda, reinterpret_cast<void*>(*stream)};
  GilReleased release;
  convert(args);
}

/// Calls `call`, and returns the launches of its kernels on cuda, which are not started.
std::vector<codecs::Launch> recorded(const py::object& call, const py::args& args) {
  codecs::Recording recording;
  call(*args);
  return std::move(recording.launches);
}

}  // namespace

void bind_codecs(py::module_& m) {
  m.def("codec_names", &codec_names);
  m.def("codec_aliases", [] {
    py::dict texts;
    for (const CodecAlias& alias : codec_aliases()) {
      texts[py::str(std::string(alias.name))] =
          std::string(alias.codec) + ":" + std::string(alias.option);
    }
    return texts;
  });
  m.def("cuda_built", &codecs::cuda_built);
  py::class_<codecs::Launch>(m, "Launch")
      .def_readonly("source", &codecs::Launch::codec)
      .def_readonly("kernel", &codecs::Launch::kernel)
      .def_readonly("blocks", &codecs::Launch::blocks)
      .def_property_readonly("params", [](const codecs::Launch& launch) {
        const std::vector<uint8_t> batch = launch.argument();
        return py::bytes(reinterpret_cast<const char*>(batch.data()), batch.size());
      });
  m.def("recorded", &recorded, py::arg("call"));
  m.attr("CUDA_THREADS") = cuda::kThreads;
  // A factor is an address or 0, and the number that applies if it is 0.
  m.def("convert", &convert_addresses, py::arg("in"), py::arg("from"), py::arg("out"),
        py::arg("to"), py::arg("numel"), py::kw_only(), py::arg("by"), py::arg("clip"),
        py::arg("divisor"), py::arg("found_inf"), py::arg("stream") = py::none());

  py::enum_<feedback::Kind>(m, "FeedbackKind")
      .value("residual", feedback::Kind::residual)
      .value("decay", feedback::Kind::decay)
      .value("momentum", feedback::Kind::momentum);
  py::enum_<feedback::Storage>(m, "FeedbackStorage")
      .value("float32", feedback::Storage::float32)
      .value("int8", feedback::Storage::int8);

  py::class_<Codec>(m, "Codec")
      .def(py::init(&make_codec), py::arg("spec"))
      .def_property_readonly("name", &Codec::name)
      .def_property_readonly("spec", &Codec::spec)
      .def_property_readonly("combine",
                             [](const Codec& codec) {
                               return codec.combine() == Combine::gather ? "gather" : "recode";
                             })
      .def_property_readonly("wire_version", &Codec::wire_version)
      .def_property_readonly("granule", &Codec::granule)
      .def_property_readonly("variable", &Codec::variable)
      .def(
          "encoded_bytes",
          [](const Codec& codec, size_t numel) {
            const DefaultArithmetic arithmetic;
            return codec.encoded_bytes(numel);
          },
          py::arg("numel"))
      .def("scratch_bytes", &Codec::scratch_bytes, py::arg("numel"))
      .def("encode", &encode, py::arg("x"), py::arg("numel"), py::arg("out"), py::kw_only(),
           py::arg("error") = Sides(), py::arg("momentum") = Sides(),
           py::arg("kind") = feedback::Kind::residual,
           py::arg("storage") = feedback::Storage::float32, py::arg("decay") = 0.0,
           py::arg("seed") = 0, py::arg("step") = 0, py::arg("tensor") = 0, py::arg("index") = 0,
           py::arg("stream") = py::none(), py::arg("scratch") = 0)
      .def("decode", &decode<false>, py::arg("payload"), py::arg("out"), py::arg("numel"),
           py::kw_only(), py::arg("stream") = py::none(), py::arg("scratch") = 0)
      .def("decode_add", &decode<true>, py::arg("payload"), py::arg("out"), py::arg("numel"),
           py::kw_only(), py::arg("stream") = py::none(), py::arg("scratch") = 0);
}

}  // namespace pycomm

// The small tools of csrc/core for tests.
#include <pybind11/stl.h>

#include <string_view>

#include "binding/core/gil.h"
#include "core/crc32c.h"
#include "core/env.h"
#include "core/philox.h"
#include "core/reduce.h"
#include "core/scrypt.h"
#include "core/sha256.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool all_finite_address(uintptr_t x, size_t numel) {
  GilReleased release;
  return all_finite({reinterpret_cast<const float*>(x), numel});
}

Span<const uint8_t> span_of(std::string_view data) {
  return {reinterpret_cast<const uint8_t*>(data.data()), data.size()};
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const Random4 out =
      philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {out.word[0], out.word[1], out.word[2], out.word[3]};
}

std::array<uint32_t, 4> random_words_of(uint64_t seed, uint32_t step, uint32_t tensor,
                                        uint64_t group) {
  const Random4 out = random_words(seed, step, tensor, group);
  return {out.word[0], out.word[1], out.word[2], out.word[3]};
}

}  // namespace

void bind_tools(py::module_& m) {
  m.def("check_reducible", &check_reducible, py::arg("dtype"), py::arg("op"));
  m.def("all_finite", &all_finite_address, py::arg("x"), py::arg("numel"));

  m.def("philox", &philox, py::arg("counter"), py::arg("key"));
  m.def("random_words", &random_words_of, py::arg("seed"), py::arg("step"), py::arg("tensor"),
        py::arg("group"));
  m.def("crc32c_by_table", [](std::string_view data, uint32_t before) {
    return crc32c_by_table(span_of(data), before);
  });
  m.def(
      "sha256", [](std::string_view message) { return to_bytes(sha256(message)); },
      py::arg("message"));
  m.def(
      "hmac_sha256",
      [](std::string_view key, std::string_view message) {
        return to_bytes(hmac_sha256(key, message));
      },
      py::arg("key"), py::arg("message"));

  m.def(
      "scrypt",
      [](std::string_view secret, std::string_view salt) { return to_bytes(scrypt(secret, salt)); },
      py::arg("secret"), py::arg("salt"));
  m.def("parse_rate", &parse_rate, py::arg("text"));
  m.def("parse_link_rate", [](const std::string& text) {
    const LinkRate rate = parse_link_rate(text);
    return py::make_tuple(rate.send, rate.receive, rate.paced);
  });
}

}  // namespace pycomm

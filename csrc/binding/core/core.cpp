// Core tools for Python: enums, errors and the small tools of csrc/core, mostly for tests and for
// people. The data path uses the communicator.
#include <pybind11/stl.h>

#include <string_view>

#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/crc32c.h"
#include "core/env.h"
#include "core/op.h"
#include "core/philox.h"
#include "core/reduce.h"
#include "core/scrypt.h"
#include "core/sha256.h"
#include "core/simd.h"
#include "core/warning.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// Binds an enum; its members have the names of the error texts.
template <typename Enum>
void bind_enum(py::module_& m, const char* python_name, int count) {
  py::enum_<Enum> type(m, python_name);
  for (int i = 0; i < count; i++) {
    const auto value = static_cast<Enum>(i);
    type.value(name(value), value);
  }
}

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

void reduce_addresses(DType dtype, ReduceOp op, const std::vector<uintptr_t>& inputs, uintptr_t out,
                      size_t numel, uintptr_t copy) {
  std::vector<const void*> pointers;
  for (const uintptr_t input : inputs) pointers.push_back(reinterpret_cast<const void*>(input));
  ReduceArgs args;
  args.dtype = dtype;
  args.op = op;
  args.inputs = pointers.data();
  args.count = static_cast<int>(pointers.size());
  args.out = reinterpret_cast<void*>(out);
  args.copy = reinterpret_cast<void*>(copy);
  args.numel = numel;
  GilReleased release;
  reduce(args);
}

void scale_addresses(DType dtype, uintptr_t input, uintptr_t out, size_t numel, double factor) {
  GilReleased release;
  scale(dtype, reinterpret_cast<const void*>(input), reinterpret_cast<void*>(out), numel, factor);
}

bool all_finite_address(uintptr_t x, size_t numel) {
  GilReleased release;
  return all_finite({reinterpret_cast<const float*>(x), numel});
}

Span<const uint8_t> bytes_of(std::string_view data) {
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

template <typename T>
const T& to_python(const T& value) {
  return value;
}
double to_python(Milliseconds time) { return time.count() / 1e3; }

py::dict to_dict(const Env& values) {
  py::dict out;
#define GROUP_OPTION(type, name, ...) out[#name] = to_python(values.name)
#define PROCESS_OPTION GROUP_OPTION
#include "core/option_table.h"
  return out;
}

/// Returns the table, a dictionary for each row, with the keywords of pycomm.env.Variable.
py::tuple option_table() {
  const py::dict defaults = to_dict(Env());
  py::list table;
  for (const OptionRow& row : option_rows()) {
    py::dict out;
    out["name"] = row.variable;
    out["option"] = row.of_group ? row.name : "";
    out["meaning"] = row.meaning;
    out["default"] =
        *row.default_text ? py::str(row.default_text) : py::str("`{}`").format(defaults[row.name]);
    out["same"] = row.same;
    out["acts"] = row.acts;
    out["page"] = row.page;
    table.append(out);
  }
  return py::tuple(table);
}

}  // namespace

void bind_core(py::module_& m) {
  py::register_local_exception_translator(translate_errors);

  bind_enum<DType>(m, "DType", kDTypes);
  bind_enum<ReduceOp>(m, "ReduceOp", kReduceOps);
  m.def("size_of", &size_of, py::arg("dtype"));

  m.def("reduce", &reduce_addresses, py::arg("dtype"), py::arg("op"), py::arg("inputs"),
        py::arg("out"), py::arg("numel"), py::kw_only(), py::arg("copy") = 0);
  m.def("scale", &scale_addresses, py::arg("dtype"), py::arg("input"), py::arg("out"),
        py::arg("numel"), py::arg("factor"));
  m.def("check_reducible", &check_reducible, py::arg("dtype"), py::arg("op"));
  m.def("all_finite", &all_finite_address, py::arg("x"), py::arg("numel"));

  m.def("philox", &philox, py::arg("counter"), py::arg("key"));
  m.def("random_words", &random_words_of, py::arg("seed"), py::arg("step"), py::arg("tensor"),
        py::arg("group"));
  m.def(
      "crc32c",
      [](std::string_view data, uint32_t before) { return crc32c(bytes_of(data), before); },
      py::arg("data"), py::arg("before") = 0);
  m.def("crc32c_ways", &crc32c_ways);
  m.def(
      "crc32c_by",
      [](const std::string& way, std::string_view data, uint32_t before) {
        return crc32c_by(way, bytes_of(data), before);
      },
      py::arg("way"), py::arg("data"), py::arg("before") = 0);
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
  set_interrupt_check(&check_signals);
  set_warning_output([](const std::string& text) {
    const GilAcquired gil;
    py::module_::import("pycomm.log").attr("logger").attr("warning")("%s", text);
  });

  m.def("parse_rate", &parse_rate, py::arg("text"));
  m.def("env", [] { return to_dict(env()); });
  m.attr("OPTIONS") = option_table();
  py::class_<GroupOptions> options(m, "GroupOptions");
  options.def(py::init<>());
#define GROUP_OPTION(type, name, ...) options.def_readwrite(#name, &GroupOptions::name)
#include "core/option_table.h"
  m.def("simd_level", &simd_level);
}

}  // namespace pycomm

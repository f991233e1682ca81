// Module pycomm._C: the torch-free core for Python. Buffers come in as addresses; the GIL is
// released around every call that may take long. Each topic has one file in binding/core; this one
// has enums, errors, reductions and options.
#include <pybind11/stl.h>

#include <string_view>

#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/crc32c.h"
#include "core/device.h"
#include "core/env.h"
#include "core/op.h"
#include "core/reduce.h"
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
  m.def("device_count", &device::count, "GPUs that this process can use; 0 without CUDA.");

  m.def("reduce", &reduce_addresses, py::arg("dtype"), py::arg("op"), py::arg("inputs"),
        py::arg("out"), py::arg("numel"), py::kw_only(), py::arg("copy") = 0);
  m.def("scale", &scale_addresses, py::arg("dtype"), py::arg("input"), py::arg("out"),
        py::arg("numel"), py::arg("factor"));
  m.def(
      "crc32c",
      [](std::string_view data, uint32_t before) {
        return crc32c({reinterpret_cast<const uint8_t*>(data.data()), data.size()}, before);
      },
      py::arg("data"), py::arg("before") = 0);
  set_interrupt_check(&check_signals);
  set_warning_output([](const std::string& text) {
    const GilAcquired gil;
    py::module_::import("pycomm.log").attr("logger").attr("warning")("%s", text);
  });

  m.def("env", [] { return to_dict(env()); });
  m.attr("OPTIONS") = option_table();
  py::class_<GroupOptions> options(m, "GroupOptions");
  options.def(py::init<>());
#define GROUP_OPTION(type, name, ...) options.def_readwrite(#name, &GroupOptions::name)
#include "core/option_table.h"
  m.def("simd_level", &simd_level);
}

}  // namespace pycomm

PYBIND11_MODULE(_C, m) {
  m.doc() = "The torch-free core of pycomm: codecs, transports and collectives on addresses.";
  pycomm::bind_core(m);
  pycomm::bind_codecs(m);
  pycomm::bind_coded(m);
  pycomm::bind_stores(m);
  pycomm::bind_communicator(m);
  pycomm::bind_optimizers(m);
}

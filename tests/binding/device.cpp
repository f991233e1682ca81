// Device groups for tests, with addresses, sizes in elements, and streams as torch's `cuda_stream`
// has them. Programs use the backend.
#include "core/device.h"

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "collectives/device/group.h"
#include "core/error.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// A group that can be closed before Python collects it.
struct OwnedGroup {
  std::unique_ptr<DeviceGroup> group;

  DeviceGroup& operator*() const {
    if (!group) throw Error("the group is closed; make a new one");
    return *group;
  }
  Stream stream(uintptr_t handle, std::pair<uintptr_t, size_t> scratch = {}) const {
    return {(**this).index() < 0 ? Device::cpu : Device::cuda,
            pointer(handle),
            {bytes(scratch.first), scratch.second}};
  }
};

std::unique_ptr<OwnedGroup> make_group(std::shared_ptr<Store> store, int rank, int size, int index,
                                       const std::string& group, double timeout,
                                       const std::string& memory, size_t staging_bytes,
                                       size_t coded_bytes, int blocks) {
  GilReleased release;
  const DeviceGroupOptions options{
      group, milliseconds(timeout), memory, staging_bytes, coded_bytes, blocks, &check_signals};
  auto owned = std::make_unique<OwnedGroup>();
  owned->group = std::make_unique<DeviceGroup>(std::move(store), rank, size, index, options);
  return owned;
}

void bind_coded(py::class_<OwnedGroup>& group) {
  // An address and bytes; on a GPU at least coded_scratch_bytes.
  const std::pair<uintptr_t, size_t> no_scratch{0, 0};
  group
      .def(
          "run_coded",
          [](const OwnedGroup& g, const std::string& op, uintptr_t input, uintptr_t out,
             const Pieces& pieces, bool average, uint64_t seed, uint32_t step, DType dtype,
             uintptr_t found_inf, uintptr_t stream, std::pair<uintptr_t, size_t> scratch) {
            const Op named = op_named(op);
            GilReleased release;
            (*g).run_coded(named,
                           pieces.args(named, (*g).size(), input, dtype, average, seed, step),
                           pointer(out), g.stream(stream, scratch), floats(found_inf));
          },
          py::arg("op"), py::arg("input"), py::arg("out"), py::arg("pieces"), py::kw_only(),
          py::arg("average") = true, py::arg("seed") = 0, py::arg("step") = 0,
          py::arg("dtype") = DType::float32, py::arg("found_inf") = 0, py::arg("stream") = 0,
          py::arg("scratch") = no_scratch)
      .def(
          "coded_scratch_bytes",
          [](const OwnedGroup& g, const std::string& op, const Pieces& pieces, DType dtype) {
            const Op named = op_named(op);
            return (*g).coded_scratch_bytes(named, pieces.args(named, (*g).size(), 0, dtype));
          },
          py::arg("op"), py::arg("pieces"), py::arg("dtype") = DType::float32);
}

}  // namespace

void bind_device(py::module_& m) {
  py::class_<device::BlockShare>(m, "BlockShare", "The blocks of one group on a GPU; for tests.")
      .def(py::init<int, int, int>(), py::arg("index"), py::arg("room"), py::arg("most"))
      .def_property_readonly("count", &device::BlockShare::count)
      .def("shrink", &device::BlockShare::shrink, py::arg("count"));

  py::class_<OwnedGroup> group(m, "DeviceGroup");
  group
      .def(py::init(&make_group), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("index") = -1, py::kw_only(), py::arg("group") = "default",
           py::arg("timeout") = 300.0, py::arg("memory") = "auto",
           py::arg("staging_bytes") = size_t{DeviceGroupOptions::kStagingBytes},
           py::arg("coded_bytes") = size_t{DeviceGroupOptions::kCodedBytes}, py::arg("blocks") = 0)
      .def("describe", [](const OwnedGroup& g) { return (*g).describe(); })
      .def("set_timeout",
           [](const OwnedGroup& g, double seconds) { (*g).set_timeout(milliseconds(seconds)); })
      .def("check", [](const OwnedGroup& g) { (*g).check(); })
      .def(
          "abort",
          [](const OwnedGroup& g, const std::string& reason, const std::string& kind, int rank,
             std::vector<int> ranks) {
            (*g).abort(notice(reason, kind, (*g).rank(), rank, std::move(ranks)));
          },
          py::arg("reason"), py::arg("kind") = "error", py::arg("rank") = -1,
          py::arg("ranks") = std::vector<int>())
      .def("close",
           [](OwnedGroup& g) {
             GilReleased release;
             g.group.reset();
           })
      .def(
          "run",
          [](const OwnedGroup& g, const std::string& op, const py::object& input,
             const py::object& out, size_t numel, DType dtype, ReduceOp redop, int root,
             double factor, const std::string& algo, uintptr_t stream) {
            const Collective call = collective(op, input, out, numel, dtype, redop, root, factor);
            const GilReleased release;
            (*g).run(call, g.stream(stream), algo);
          },
          py::arg("op"), py::arg("input") = 0, py::arg("out") = 0, py::arg("numel") = 0,
          py::arg("dtype") = DType::uint8, py::arg("redop") = ReduceOp::sum, py::arg("root") = -1,
          py::kw_only(), py::arg("factor") = 1.0, py::arg("algo") = "auto", py::arg("stream") = 0);
  bind_coded(group);
}

}  // namespace pycomm

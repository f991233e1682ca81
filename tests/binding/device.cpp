// Device groups for tests, with addresses, sizes in elements, and streams as torch's `cuda_stream`
// has them. Programs use the backend.
#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "collectives/device/blocks.h"
#include "collectives/device/group.h"
#include "core/device.h"
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

/// As Passed, and a number for a stream.
template <typename T>
struct PassedToGroup {
  using Type = typename Passed<T>::Type;
  static decltype(auto) as(const OwnedGroup&, const Type& value) { return Passed<T>::as(value); }
};
template <>
struct PassedToGroup<Stream> {
  using Type = uintptr_t;
  static Stream as(const OwnedGroup& g, uintptr_t stream) { return g.stream(stream); }
};

std::unique_ptr<OwnedGroup> make_group(std::shared_ptr<Store> store, int rank, int size, int index,
                                       const std::string& group, double timeout,
                                       const std::string& memory, size_t staging_bytes,
                                       size_t coded_bytes, int blocks, uint32_t first_barrier) {
  GilReleased release;
  const DeviceGroupOptions options{group,         milliseconds(timeout), memory,
                                   staging_bytes, coded_bytes,           blocks,
                                   first_barrier, &check_signals};
  auto owned = std::make_unique<OwnedGroup>();
  owned->group = std::make_unique<DeviceGroup>(std::move(store), rank, size, index, options);
  return owned;
}

/// Returns a function for Python that calls a collective of a group.
template <typename... Args>
auto of_group(void (DeviceGroup::*method)(Args...)) {
  return [method](const OwnedGroup& g, const typename PassedToGroup<Args>::Type&... args) {
    const GilReleased release;
    ((*g).*method)(PassedToGroup<Args>::as(g, args)...);
  };
}

void bind_coded(py::class_<OwnedGroup>& group) {
  // An address and bytes; on a GPU at least coded_scratch_bytes.
  const std::pair<uintptr_t, size_t> no_scratch{0, 0};
  group
      .def(
          "all_reduce_coded",
          [](const OwnedGroup& g, uintptr_t data, const Pieces& pieces, bool average, uint64_t seed,
             uint32_t step, DType dtype, uintptr_t found_inf, uintptr_t stream,
             std::pair<uintptr_t, size_t> scratch) {
            GilReleased release;
            (*g).all_reduce_coded(pieces.args(data, 1, dtype, average, seed, step),
                                  g.stream(stream, scratch), floats(found_inf));
          },
          py::arg("data"), py::arg("pieces"), py::kw_only(), py::arg("average") = true,
          py::arg("seed") = 0, py::arg("step") = 0, py::arg("dtype") = DType::float32,
          py::arg("found_inf") = 0, py::arg("stream") = 0, py::arg("scratch") = no_scratch)
      .def(
          "reduce_scatter_coded",
          [](const OwnedGroup& g, uintptr_t input, uintptr_t out, const Pieces& pieces,
             bool average, uint64_t seed, uint32_t step, DType dtype, uintptr_t found_inf,
             uintptr_t stream, std::pair<uintptr_t, size_t> scratch) {
            GilReleased release;
            (*g).reduce_scatter_coded(pieces.args(input, (*g).size(), dtype, average, seed, step),
                                      pointer(out), g.stream(stream, scratch), floats(found_inf));
          },
          py::arg("input"), py::arg("out"), py::arg("pieces"), py::kw_only(),
          py::arg("average") = true, py::arg("seed") = 0, py::arg("step") = 0,
          py::arg("dtype") = DType::float32, py::arg("found_inf") = 0, py::arg("stream") = 0,
          py::arg("scratch") = no_scratch)
      .def(
          "all_gather_coded",
          [](const OwnedGroup& g, uintptr_t input, uintptr_t out, const Pieces& pieces,
             uint64_t seed, uint32_t step, DType dtype, uintptr_t found_inf, uintptr_t stream,
             std::pair<uintptr_t, size_t> scratch) {
            GilReleased release;
            (*g).all_gather_coded(pieces.args(input, 1, dtype, false, seed, step), pointer(out),
                                  g.stream(stream, scratch), floats(found_inf));
          },
          py::arg("input"), py::arg("out"), py::arg("pieces"), py::kw_only(), py::arg("seed") = 0,
          py::arg("step") = 0, py::arg("dtype") = DType::float32, py::arg("found_inf") = 0,
          py::arg("stream") = 0, py::arg("scratch") = no_scratch)
      .def(
          "coded_scratch_bytes",
          [](const OwnedGroup& g, const std::string& op, const Pieces& pieces, DType dtype) {
            const bool scatters = op == "reduce_scatter";
            const CodedArgs args = pieces.args(0, scatters ? (*g).size() : 1, dtype);
            return (*g).coded_scratch_bytes(scatters             ? Op::reduce_scatter
                                            : op == "all_gather" ? Op::all_gather
                                                                 : Op::all_reduce,
                                            args);
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
           py::arg("coded_bytes") = size_t{DeviceGroupOptions::kCodedBytes}, py::arg("blocks") = 0,
           py::arg("first_barrier") = 0)
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
      .def("all_reduce", of_group(&DeviceGroup::all_reduce), py::arg("data"), py::arg("numel"),
           py::arg("dtype"), py::arg("op"), py::kw_only(), py::arg("stream") = 0,
           py::arg("factor") = 1.0, py::arg("algo") = "auto")
      .def("reduce_scatter", of_group(&DeviceGroup::reduce_scatter), py::arg("input"),
           py::arg("out"), py::arg("dtype"), py::arg("op"), py::kw_only(), py::arg("stream") = 0,
           py::arg("factor") = 1.0)
      .def("reduce", of_group(&DeviceGroup::reduce), py::arg("input"), py::arg("out"),
           py::arg("numel"), py::arg("dtype"), py::arg("op"), py::arg("root"), py::kw_only(),
           py::arg("stream") = 0, py::arg("factor") = 1.0)
      .def("all_gather", of_group(&DeviceGroup::all_gather), py::arg("input"), py::arg("out"),
           py::arg("dtype"), py::kw_only(), py::arg("stream") = 0)
      .def("all_to_all", of_group(&DeviceGroup::all_to_all), py::arg("input"), py::arg("out"),
           py::arg("dtype"), py::kw_only(), py::arg("stream") = 0)
      .def("broadcast", of_group(&DeviceGroup::broadcast), py::arg("data"), py::arg("numel"),
           py::arg("dtype"), py::arg("root"), py::kw_only(), py::arg("stream") = 0)
      .def("gather", of_group(&DeviceGroup::gather), py::arg("input"), py::arg("numel"),
           py::arg("out"), py::arg("dtype"), py::arg("root"), py::kw_only(), py::arg("stream") = 0)
      .def("scatter", of_group(&DeviceGroup::scatter), py::arg("input"), py::arg("out"),
           py::arg("numel"), py::arg("dtype"), py::arg("root"), py::kw_only(),
           py::arg("stream") = 0)
      .def("barrier", of_group(&DeviceGroup::barrier), py::kw_only(), py::arg("stream") = 0);
  bind_coded(group);
}

}  // namespace pycomm

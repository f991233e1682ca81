// Passes over moments on a GPU, for momentum/on_device/passes.py, by addresses of its memory.
#include "optim/device_moments.h"

#include <pybind11/stl.h>

#include <tuple>

#include "binding/core/arguments.h"
#include "binding/core/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using moments::DeviceMoments;

namespace on_device {

/// The two sides of stored values, and their form.
using SidesAt = std::tuple<uintptr_t, uintptr_t, uint32_t>;

moments::StoredPair sides(const SidesAt& at) {
  const auto& [first, second, form] = at;
  return {{bytes(first), bytes(second)}, form};
}

/// Offset, that of its sums, rows, columns; what is kept, second moments by row and by column;
/// momentum, its form; residual; what was sent.
void add(DeviceMoments& self, const std::tuple<size_t, size_t, uint32_t, uint32_t>& place,
         const std::array<uintptr_t, 3>& at, const std::pair<uintptr_t, uint32_t>& momentum,
         const SidesAt& residual, const SidesAt& own) {
  const auto& [offset, sums_at, rows, columns] = place;
  self.add({offset, sums_at, rows, columns, floats(at[0]), floats(at[1]), floats(at[2]),
            bytes(momentum.first), momentum.second, sides(residual), sides(own)});
}

Stream on(uintptr_t stream) { return {Device::cuda, pointer(stream), {}}; }

/// Signs, first row and distance of projections; coefficient of the momentum; sides of o and of e
/// that are read.
using TurnAt = std::tuple<uintptr_t, uint32_t, uint32_t, double, int, uint32_t>;

std::vector<moments::Turn> turns_of(const std::vector<TurnAt>& turns) {
  std::vector<moments::Turn> all;
  for (const auto& [signs, first, stride, momentum, own, residual] : turns) {
    all.push_back({floats(signs), first, stride, momentum, own, residual});
  }
  return all;
}

void squares(const DeviceMoments& self, uintptr_t values, DType dtype,
             const std::vector<TurnAt>& turns, uintptr_t scratch, double unit, double bound,
             uint32_t ranks, uintptr_t stream) {
  self.squares(pointer(values), dtype, turns_of(turns), floats(scratch), unit, bound, ranks,
               on(stream));
}

void encode(const DeviceMoments& self, uintptr_t values, DType dtype,
            const std::vector<TurnAt>& turns, uintptr_t copy, uintptr_t scratch, bool divides,
            uintptr_t swapped, uintptr_t stream) {
  self.encode(pointer(values), dtype, turns_of(turns), pointer(copy), floats(scratch), divides,
              floats(swapped), on(stream));
}

/// The residual before the coding or 0, the side where it is, and the side of o that is written.
using SendingAt = std::tuple<uintptr_t, uint32_t, uint32_t>;

void sent(const DeviceMoments& self, uintptr_t values, DType dtype,
          const std::vector<SendingAt>& sendings, uintptr_t swapped, uintptr_t stream) {
  std::vector<moments::Sending> all;
  for (const auto& [before, residual, own] : sendings) {
    all.push_back({bytes(before), residual, own});
  }
  self.sent(pointer(values), dtype, all, floats(swapped), on(stream));
}

void land(const DeviceMoments& self, uintptr_t values, DType dtype, double unit, bool divides,
          uintptr_t stream) {
  self.land(pointer(values), dtype, unit, divides, on(stream));
}

void collect(const DeviceMoments& self, uintptr_t sums, uintptr_t stream) {
  self.collect(floats(sums), on(stream));
}

/// How the sums of a matrix are used, beta2 and eps.
using CommitAt = std::tuple<moments::Use, double, double>;

void commit(const DeviceMoments& self, uintptr_t sums, const std::vector<CommitAt>& how,
            uint32_t ranks, uintptr_t stream) {
  std::vector<DeviceMoments::Commit> all;
  for (const auto& [use, beta2, eps] : how) all.push_back({use, beta2, eps});
  self.commit(floats(sums), all, ranks, on(stream));
}

/// Number of the matrix; parameter and gradient; lr, keep and limit; whether it was landed.
using StepAt = std::tuple<size_t, uintptr_t, uintptr_t, double, double, double, bool>;

void move(const DeviceMoments& self, const std::vector<StepAt>& steps, DType dtype,
          uintptr_t stream) {
  std::vector<DeviceMoments::Step> all;
  for (const auto& [matrix, values, gradient, lr, keep, limit, probed] : steps) {
    all.push_back({matrix, pointer(values), pointer(gradient), lr, keep, limit, probed});
  }
  self.move(all, dtype, on(stream));
}

}  // namespace on_device
}  // namespace

void bind_device_moments(py::module_& m) {
  m.attr("MOMENT_EXTRA") = moments::kExtra;
  m.attr("MOMENT_NUMBERS") = sizeof(moments::Numbers) / sizeof(float);
  py::enum_<moments::Use>(m, "MomentUse")
      .value("nothing", moments::kNothing)
      .value("step", moments::kStep)
      .value("scale", moments::kScale);
  py::class_<DeviceMoments>(m, "DeviceMoments")
      .def(py::init<>())
      .def("add", &on_device::add)
      .def_property_readonly("scratch_floats", &DeviceMoments::scratch_floats)
      .def("squares", &on_device::squares)
      .def("encode", &on_device::encode)
      .def("sent", &on_device::sent)
      .def("land", &on_device::land)
      .def("collect", &on_device::collect)
      .def("commit", &on_device::commit)
      .def("move", &on_device::move);
}

}  // namespace pycomm

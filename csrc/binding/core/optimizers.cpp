// Operations of optimizers, for pycomm/momentum and pycomm/optim.
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/arithmetic.h"
#include "optim/moments.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// An address from Python, which becomes a pointer of any type.
struct Address {
  uintptr_t value;
  template <typename To>
  operator To*() const {
    return reinterpret_cast<To*>(value);
  }
};

}  // namespace
}  // namespace pycomm

template <>
struct pybind11::detail::type_caster<pycomm::Address> {
  PYBIND11_TYPE_CASTER(pycomm::Address, const_name("int"));
  bool load(handle given, bool) {
    value = {given.cast<uintptr_t>()};
    return true;
  }
};

namespace pycomm {
namespace {

// C++ works without Python.
using Works = py::call_guard<GilReleased, DefaultArithmetic>;

/// Returns where passes run. `given`: threads or a stream.
moments::Where where_of(bool on_host, uintptr_t given) {
  if (on_host) return {static_cast<int>(given), {}};
  return {1, {Device::cuda, pointer(given), {}}};
}

/// Matrices, and whether the host works on them: else a stream does.
struct Moments : moments::Moments {
  explicit Moments(bool on_host) : on_host(on_host) {}
  moments::Where where(uintptr_t given) const { return where_of(on_host, given); }
  const bool on_host;
};

/// Returns the struct of the members that Python gives, in order.
template <typename To, typename From>
To made(const From& from) {
  return std::apply([](const auto&... members) { return To{members...}; }, from);
}
template <typename To, typename From>
std::vector<To> made_all(const std::vector<From>& from) {
  std::vector<To> all;
  all.reserve(from.size());
  for (const From& each : from) all.push_back(made<To>(each));
  return all;
}

using RowsGiven = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint16_t, uint16_t>;
using StoredGiven = std::pair<Address, uint32_t>;
using SidesGiven = std::tuple<Address, Address, uint32_t>;
using BucketGiven =
    std::tuple<Address, DType, double, float, uint32_t, Address, bool, Address, Address>;
using TurnGiven = std::tuple<Address, uint32_t, uint32_t, double, float, int, uint32_t, bool>;
using SendingGiven = std::tuple<Address, uint32_t, uint32_t, float>;
using CommitGiven = std::tuple<moments::Use, double, double>;
using StepGiven = std::tuple<size_t, Address, Address, double, double, double, float, bool, bool>;

/// `at`: what is kept, second moments by row and by column, how these are heard.
void add(Moments& self, const std::pair<size_t, size_t>& place, const RowsGiven& rows,
         const std::array<Address, 4>& at, const StoredGiven& momentum, const SidesGiven& residual,
         const SidesGiven& own) {
  self.add({place.first, place.second, made<moments::Rows>(rows), at[0], at[1], at[2], at[3],
            made<moments::Stored>(momentum), made<moments::StoredPair>(residual),
            made<moments::StoredPair>(own)});
}

void code(const Moments& self, const BucketGiven& bucket, const std::vector<TurnGiven>& turns,
          bool encodes, uintptr_t where) {
  self.code(made<moments::Bucket>(bucket), made_all<moments::Turn>(turns), encodes,
            self.where(where));
}

void sent(const Moments& self, Address values, DType dtype,
          const std::vector<SendingGiven>& sendings, bool divides, Address swapped,
          uintptr_t where) {
  self.sent(values, dtype, made_all<moments::Sending>(sendings), divides, swapped,
            self.where(where));
}

void commit(const Moments& self, Address sums, const std::vector<CommitGiven>& how, uint32_t ranks,
            uintptr_t where) {
  self.commit(sums, made_all<moments::Commit>(how), ranks, self.where(where));
}

void move(const Moments& self, const std::vector<StepGiven>& steps, DType dtype, uintptr_t where) {
  self.move(made_all<moments::Step>(steps), dtype, self.where(where));
}

using TensorsGiven = std::vector<std::tuple<Address, Address, Address, Address, Address, size_t>>;

void adamw_step(bool on_host, const TensorsGiven& tensors, double lr, double beta1, double beta2,
                double eps, double weight_decay, uintptr_t where) {
  moments::step_by_adamw(made_all<moments::Tensor>(tensors), {lr, beta1, beta2, eps, weight_decay},
                         where_of(on_host, where));
}

}  // namespace

void bind_optimizers(py::module_& m) {
  m.attr("MOMENT_EXTRA") = moments::kExtra;
  m.attr("MOMENT_NUMBERS") = sizeof(moments::Numbers) / sizeof(float);
  py::enum_<moments::Use>(m, "MomentUse")
      .value("nothing", moments::kNothing)
      .value("step", moments::kStep)
      .value("scale", moments::kScale);
  py::class_<Moments>(m, "Moments")
      .def(py::init<bool>())
      .def("add", &add)
      .def_property_readonly("scratch_floats", &Moments::scratch_floats)
      .def("code", &code, Works())
      .def("sent", &sent, Works())
      .def(
          "land",
          [](const Moments& self, Address values, DType dtype, double unit, bool divides,
             uintptr_t where) { self.land(values, dtype, unit, divides, self.where(where)); },
          Works())
      .def(
          "collect",
          [](const Moments& self, Address sums, uintptr_t where) {
            self.collect(sums, self.where(where));
          },
          Works())
      .def("commit", &commit, Works())
      .def("move", &move, Works());
  m.def("adamw_step", &adamw_step, Works());
}

}  // namespace pycomm

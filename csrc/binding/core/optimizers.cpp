// Operations of optimizers, for pycomm/momentum and pycomm/optim.
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/arithmetic.h"
#include "optim/adamw.h"
#include "optim/device_moments.h"
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

using moments::DeviceMoments;
using moments::HostMoments;

/// Where C++ works: threads of the host, without Python; or a stream.
template <typename Moments>
struct Where {
  explicit Where(uintptr_t given) : at{Device::cuda, pointer(given), {}} {}
  const Stream at;
};
template <>
struct Where<HostMoments> {
  explicit Where(uintptr_t given) : at(static_cast<int>(given)) {}
  const GilReleased release;
  const DefaultArithmetic arithmetic;
  const int at;
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

namespace passes {

using RowsGiven = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint16_t, uint16_t>;
using StoredGiven = std::pair<Address, uint32_t>;
using SidesGiven = std::tuple<Address, Address, uint32_t>;
using PassGiven =
    std::tuple<Address, DType, double, float, uint32_t, Address, bool, Address, Address>;
using TurnGiven = std::tuple<Address, uint32_t, uint32_t, double, float, int, uint32_t, bool>;
using SendingGiven = std::tuple<Address, uint32_t, uint32_t, float>;
using CommitGiven = std::tuple<moments::Use, double, double>;
using StepGiven = std::tuple<size_t, Address, Address, double, double, double, float, bool, bool>;

/// `at`: what is kept, second moments by row and by column, how these are heard.
template <typename Moments>
void add(Moments& self, const std::pair<size_t, size_t>& place, const RowsGiven& rows,
         const std::array<Address, 4>& at, const StoredGiven& momentum, const SidesGiven& residual,
         const SidesGiven& own) {
  self.add({place.first, place.second, made<moments::Rows>(rows), at[0], at[1], at[2], at[3],
            made<moments::Stored>(momentum), made<moments::StoredPair>(residual),
            made<moments::StoredPair>(own)});
}

/// `kPass` is squares() or encode().
template <typename Moments, auto kPass>
void take_turns(const Moments& self, const PassGiven& pass, const std::vector<TurnGiven>& turns,
                uintptr_t where) {
  (self.*kPass)(made<moments::Pass>(pass), made_all<moments::Turn>(turns),
                Where<Moments>(where).at);
}

template <typename Moments>
void sent(const Moments& self, Address values, DType dtype,
          const std::vector<SendingGiven>& sendings, bool divides, Address swapped,
          uintptr_t where) {
  self.sent(values, dtype, made_all<moments::Sending>(sendings), divides, swapped,
            Where<Moments>(where).at);
}

template <typename Moments>
void land(const Moments& self, Address values, DType dtype, double unit, bool divides,
          uintptr_t where) {
  self.land(values, dtype, unit, divides, Where<Moments>(where).at);
}

template <typename Moments>
void collect(const Moments& self, Address sums, uintptr_t where) {
  self.collect(sums, Where<Moments>(where).at);
}

template <typename Moments>
void commit(const Moments& self, Address sums, const std::vector<CommitGiven>& how, uint32_t ranks,
            uintptr_t where) {
  self.commit(sums, made_all<moments::Commit>(how), ranks, Where<Moments>(where).at);
}

template <typename Moments>
void move(const Moments& self, const std::vector<StepGiven>& steps, DType dtype, uintptr_t where) {
  self.move(made_all<moments::Step>(steps), dtype, Where<Moments>(where).at);
}

template <typename Moments>
void bind(py::module_& m, const char* name) {
  py::class_<Moments>(m, name)
      .def(py::init<>())
      .def("add", &add<Moments>)
      .def_property_readonly("scratch_floats", &Moments::scratch_floats)
      .def("squares", &take_turns<Moments, &Moments::squares>)
      .def("encode", &take_turns<Moments, &Moments::encode>)
      .def("sent", &sent<Moments>)
      .def("land", &land<Moments>)
      .def("collect", &collect<Moments>)
      .def("commit", &commit<Moments>)
      .def("move", &move<Moments>);
}

}  // namespace passes

using TensorsGiven = std::vector<std::tuple<Address, Address, Address, Address, Address, size_t>>;

void adamw_step(const TensorsGiven& tensors, double lr, double beta1, double beta2, double eps,
                double weight_decay, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  adamw::step(made_all<adamw::Tensor>(tensors), {lr, beta1, beta2, eps, weight_decay}, threads);
}

void adamw_step_on_device(const TensorsGiven& tensors, double lr, double beta1, double beta2,
                          double eps, double weight_decay, uintptr_t stream) {
  adamw::step_on_device(made_all<adamw::Tensor>(tensors), {lr, beta1, beta2, eps, weight_decay},
                        {Device::cuda, pointer(stream), {}});
}

}  // namespace

void bind_optimizers(py::module_& m) {
  m.attr("MOMENT_EXTRA") = moments::kExtra;
  m.attr("MOMENT_NUMBERS") = sizeof(moments::Numbers) / sizeof(float);
  py::enum_<moments::Use>(m, "MomentUse")
      .value("nothing", moments::kNothing)
      .value("step", moments::kStep)
      .value("scale", moments::kScale);
  passes::bind<HostMoments>(m, "HostMoments");
  passes::bind<DeviceMoments>(m, "DeviceMoments");
  m.def("adamw_step", &adamw_step);
  m.def("adamw_step_on_device", &adamw_step_on_device);
}

}  // namespace pycomm

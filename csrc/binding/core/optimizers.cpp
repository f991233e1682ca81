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

namespace passes {  // by addresses

/// Address and form of values.
using StoredAt = std::pair<uintptr_t, uint32_t>;

moments::Stored stored(const StoredAt& at) { return {bytes(at.first), at.second}; }

/// The two sides of stored values, and their form.
using SidesAt = std::tuple<uintptr_t, uintptr_t, uint32_t>;

moments::StoredPair sides(const SidesAt& at) {
  const auto& [first, second, form] = at;
  return {{bytes(first), bytes(second)}, form};
}

/// Offset, that of its sums; Rows; what is kept, second moments by row and by column, how these are
/// heard; momentum; residual; what was sent.
template <typename Moments>
void add(Moments& self, const std::pair<size_t, size_t>& place, const std::array<uint32_t, 6>& rows,
         const std::array<uintptr_t, 4>& at, const StoredAt& momentum, const SidesAt& residual,
         const SidesAt& own) {
  self.add({place.first,
            place.second,
            {rows[0], rows[1], rows[2], rows[3], static_cast<uint16_t>(rows[4]),
             static_cast<uint16_t>(rows[5])},
            floats(at[0]),
            floats(at[1]),
            floats(at[2]),
            floats(at[3]),
            stored(momentum),
            sides(residual),
            sides(own)});
}

/// Signs, first row and distance of projections; coefficient of the momentum, and `kept`; sides of
/// o and of e that are read; whether the matrix is new.
using TurnAt = std::tuple<uintptr_t, uint32_t, uint32_t, double, float, int, uint32_t, bool>;
/// Values, dtype; unit, bound, ranks; copy, whether to divide; scratch, swapped.
using PassAt =
    std::tuple<uintptr_t, DType, double, float, uint32_t, uintptr_t, bool, uintptr_t, uintptr_t>;

moments::Pass pass(const PassAt& at) {
  const auto& [values, dtype, unit, bound, ranks, copy, divides, scratch, swapped] = at;
  return {pointer(values), dtype,           unit,           bound, ranks, pointer(copy),
          divides,         floats(scratch), floats(swapped)};
}

std::vector<moments::Turn> turns_of(const std::vector<TurnAt>& turns) {
  std::vector<moments::Turn> all;
  for (const auto& [signs, first, stride, momentum, kept, own, residual, is_new] : turns) {
    all.push_back({floats(signs), first, stride, momentum, kept, own, residual, is_new});
  }
  return all;
}

template <typename Moments>
void squares(const Moments& self, const PassAt& at, const std::vector<TurnAt>& turns,
             uintptr_t where) {
  self.squares(pass(at), turns_of(turns), Where<Moments>(where).at);
}

template <typename Moments>
void encode(const Moments& self, const PassAt& at, const std::vector<TurnAt>& turns,
            uintptr_t where) {
  self.encode(pass(at), turns_of(turns), Where<Moments>(where).at);
}

/// The residual before the coding or 0, the side where it is, the side of o that is written, and
/// `kept`.
using SendingAt = std::tuple<uintptr_t, uint32_t, uint32_t, float>;

template <typename Moments>
void sent(const Moments& self, uintptr_t values, DType dtype,
          const std::vector<SendingAt>& sendings, bool divides, uintptr_t swapped,
          uintptr_t where) {
  std::vector<moments::Sending> all;
  for (const auto& [before, residual, own, kept] : sendings) {
    all.push_back({bytes(before), residual, own, kept});
  }
  self.sent(pointer(values), dtype, all, divides, floats(swapped), Where<Moments>(where).at);
}

template <typename Moments>
void land(const Moments& self, uintptr_t values, DType dtype, double unit, bool divides,
          uintptr_t where) {
  self.land(pointer(values), dtype, unit, divides, Where<Moments>(where).at);
}

template <typename Moments>
void collect(const Moments& self, uintptr_t sums, uintptr_t where) {
  self.collect(floats(sums), Where<Moments>(where).at);
}

/// How the sums of a matrix are used, beta2 and eps.
using CommitAt = std::tuple<moments::Use, double, double>;

template <typename Moments>
void commit(const Moments& self, uintptr_t sums, const std::vector<CommitAt>& how, uint32_t ranks,
            uintptr_t where) {
  std::vector<moments::Commit> all;
  for (const auto& [use, beta2, eps] : how) all.push_back({use, beta2, eps});
  self.commit(floats(sums), all, ranks, Where<Moments>(where).at);
}

/// Number of the matrix; parameter and gradient; lr, keep and limit; `kept`, whether to divide, and
/// whether it was landed.
using StepAt = std::tuple<size_t, uintptr_t, uintptr_t, std::array<double, 3>, float, bool, bool>;

template <typename Moments>
void move(const Moments& self, const std::vector<StepAt>& steps, DType dtype, uintptr_t where) {
  std::vector<moments::Step> all;
  for (const auto& [matrix, values, gradient, by, kept, divides, probed] : steps) {
    all.push_back(
        {matrix, pointer(values), pointer(gradient), by[0], by[1], by[2], kept, divides, probed});
  }
  self.move(all, dtype, Where<Moments>(where).at);
}

template <typename Moments>
void bind(py::module_& m, const char* name) {
  py::class_<Moments>(m, name)
      .def(py::init<>())
      .def("add", &add<Moments>)
      .def_property_readonly("scratch_floats", &Moments::scratch_floats)
      .def("squares", &squares<Moments>)
      .def("encode", &encode<Moments>)
      .def("sent", &sent<Moments>)
      .def("land", &land<Moments>)
      .def("collect", &collect<Moments>)
      .def("commit", &commit<Moments>)
      .def("move", &move<Moments>);
}

}  // namespace passes

/// Addresses of a tensor, its gradient, momentum, squares and steps, and its number of values.
using AdamwTensor = std::array<uintptr_t, 6>;

std::vector<adamw::Tensor> adamw_tensors(const std::vector<AdamwTensor>& tensors) {
  std::vector<adamw::Tensor> all;
  all.reserve(tensors.size());
  for (const auto& [x, gradient, momentum, squares, steps, numel] : tensors) {
    all.push_back(
        {floats(x), floats(gradient), floats(momentum), floats(squares), floats(steps), numel});
  }
  return all;
}

void adamw_step(const std::vector<AdamwTensor>& tensors, double lr, double beta1, double beta2,
                double eps, double weight_decay, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  adamw::step(adamw_tensors(tensors), {lr, beta1, beta2, eps, weight_decay}, threads);
}

void adamw_step_on_device(const std::vector<AdamwTensor>& tensors, double lr, double beta1,
                          double beta2, double eps, double weight_decay, uintptr_t stream) {
  adamw::step_on_device(adamw_tensors(tensors), {lr, beta1, beta2, eps, weight_decay},
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

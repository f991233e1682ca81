// Operations of optimizers, for momentum/scaled.py and optim/coded_adamw.py.
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

namespace passes {  // by addresses

using moments::Stored;

/// Address and form of stored values.
using StoredAt = std::pair<uintptr_t, int>;

Stored stored(const StoredAt& at) {
  return {bytes(at.first), static_cast<feedback::Storage>(at.second)};
}

/// Values, rows and columns; factors by row and by column.
using MatrixAt = std::tuple<uintptr_t, size_t, size_t, uintptr_t, uintptr_t>;

moments::Matrix matrix(const MatrixAt& at) {
  const auto& [values, rows, columns, row, column] = at;
  return {floats(values), rows, columns, floats(row), floats(column)};
}

/// A matrix, its rows without padding; momentum, rows of it, beta, rest; sums by row and column,
/// unit; bounds, most; signs, first, stride, projections, by; residual, errors, copy; gradient and
/// parameter, decay.
using EncodeAt = std::tuple<MatrixAt, size_t, std::tuple<StoredAt, size_t, float, float>,
                            std::tuple<uintptr_t, uintptr_t, float>, std::pair<uintptr_t, float>,
                            std::tuple<uintptr_t, size_t, size_t, uintptr_t, float>, StoredAt,
                            uintptr_t, uintptr_t, std::tuple<StoredAt, StoredAt, float>>;

std::vector<moments::Encode> encodes(const std::vector<EncodeAt>& matrices) {
  std::vector<moments::Encode> all;
  for (const auto& [at, real, momentum, sums, bound, signs, residual, errors, copy, given] :
       matrices) {
    const moments::Matrix x = matrix(at);
    const auto& [m, known, beta, rest] = momentum;
    const auto& [row_sums, column_sums, unit] = sums;
    const auto& [signs_at, first, stride, projections, by] = signs;
    const auto& [gradient, parameter, decay] = given;
    all.push_back({x.values,
                   x.rows,
                   x.columns,
                   real,
                   x.row,
                   x.column,
                   stored(m),
                   known,
                   beta,
                   rest,
                   floats(row_sums),
                   floats(column_sums),
                   unit,
                   floats(bound.first),
                   bound.second,
                   floats(signs_at),
                   first,
                   stride,
                   floats(projections),
                   by,
                   stored(residual),
                   floats(errors),
                   floats(copy),
                   stored(gradient),
                   stored(parameter),
                   decay});
  }
  return all;
}

void encode(const std::vector<EncodeAt>& matrices, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  moments::encode(encodes(matrices), threads);
}

Stream on(uintptr_t stream) { return {Device::cuda, pointer(stream), {}}; }

void encode_on_device(const std::vector<EncodeAt>& matrices, uintptr_t scratch, uintptr_t stream) {
  moments::encode_on_device(encodes(matrices), floats(scratch), on(stream));
}

/// Places and values of a probe.
using ProbeAt = std::tuple<uint32_t, uint32_t, float, float>;

std::vector<ProbeAt> land(const std::vector<MatrixAt>& matrices, float unit, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  std::vector<moments::Matrix> all;
  for (const MatrixAt& at : matrices) all.push_back(matrix(at));
  std::vector<ProbeAt> found;
  for (const moments::Probe& probe : moments::land(all, unit, threads)) {
    found.emplace_back(probe.at[0], probe.at[1], probe.value[0], probe.value[1]);
  }
  return found;
}

/// A matrix; the residual before and after; where it is stored.
using SentAt = std::tuple<MatrixAt, StoredAt, StoredAt, StoredAt>;

std::vector<moments::Sent> sents(const std::vector<SentAt>& matrices) {
  std::vector<moments::Sent> all;
  for (const auto& [at, before, after, out] : matrices) {
    all.push_back(
        {matrix(at), stored(before), stored(after), bytes(out.first), stored(out).storage});
  }
  return all;
}

void sent(const std::vector<SentAt>& matrices, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  moments::sent(sents(matrices), threads);
}

void sent_on_device(const std::vector<SentAt>& matrices, uintptr_t stream) {
  moments::sent_on_device(sents(matrices), on(stream));
}

/// A matrix; gradient and momentum; lr, keep and limit; a probe.
using MoveAt = std::tuple<MatrixAt, uintptr_t, uintptr_t, float, float, float, ProbeAt>;

std::vector<moments::Move> moves(const std::vector<MoveAt>& matrices) {
  std::vector<moments::Move> all;
  for (const auto& [at, gradient, momentum, lr, keep, limit, probe] : matrices) {
    const auto& [first, second, largest, smallest] = probe;
    all.push_back({matrix(at),
                   floats(gradient),
                   floats(momentum),
                   lr,
                   keep,
                   limit,
                   {{first, second}, {largest, smallest}}});
  }
  return all;
}

void move(const std::vector<MoveAt>& matrices, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  moments::move(moves(matrices), threads);
}

void move_on_device(const std::vector<MoveAt>& matrices, DType dtype, uintptr_t stream) {
  moments::move_on_device(moves(matrices), dtype, on(stream));
}

/// Means and squares; see moments::Heard.
using HeardAt = std::pair<uintptr_t, uintptr_t>;

moments::Heard heard(const HeardAt& at) { return {floats(at.first), floats(at.second)}; }

/// Sums by row, their number, how they are heard; the same by column; weight.
using SumsAt = std::tuple<uintptr_t, size_t, HeardAt, uintptr_t, size_t, HeardAt, float>;

moments::Sums sums_at(const SumsAt& at) {
  const auto& [row, rows, by_row, column, columns, by_column, weight] = at;
  return {floats(row), rows, floats(column), columns, weight, heard(by_row), heard(by_column)};
}

void fold(const SumsAt& sums, uintptr_t fresh, float decay, float weight, int steps) {
  const DefaultArithmetic arithmetic;
  moments::fold(sums_at(sums), floats(fresh), decay, weight, steps);
}

void factors(const SumsAt& sums, uintptr_t row, uintptr_t column) {
  const DefaultArithmetic arithmetic;
  moments::factors(sums_at(sums), floats(row), floats(column));
}

void reciprocal_factors(const SumsAt& sums, size_t all_rows, float least, uintptr_t row,
                        uintptr_t column) {
  const DefaultArithmetic arithmetic;
  moments::reciprocal_factors(sums_at(sums), all_rows, least, floats(row), floats(column));
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
  m.def("moments_encode", &passes::encode);
  m.def("moments_land", &passes::land);
  m.def("moments_sent", &passes::sent);
  m.def("moments_move", &passes::move);
  m.def("moments_encode_on_device", &passes::encode_on_device);
  m.def("moments_sent_on_device", &passes::sent_on_device);
  m.def("moments_move_on_device", &passes::move_on_device);
  m.def("moments_fold", &passes::fold);
  m.def("moments_factors", &passes::factors);
  m.def("moments_reciprocal_factors", &passes::reciprocal_factors);
  m.def("adamw_step", &adamw_step);
  m.def("adamw_step_on_device", &adamw_step_on_device);
  m.attr("MOMENT_FLOOR") = moments::kFloor;
  m.attr("MOMENT_HEARD_DECAY") = moments::kHeardDecay;
  m.attr("MOMENT_EVEN") = moments::kEven;
  m.attr("MOMENT_LEAST_SHARE") = moments::kLeastShare;
}

}  // namespace pycomm

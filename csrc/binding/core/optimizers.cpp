// Operations of optimizers, for reduction/momentum/scaled.py and optim/coded_adamw.py.
#include <pybind11/stl.h>

#include <array>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/arithmetic.h"
#include "optim/adamw.h"
#include "optim/factored_moments.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using factored_moments::Matrix;

void add_squares(uintptr_t x, size_t rows, size_t columns, uintptr_t row, uintptr_t column,
                 float unit, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  factored_moments::add_squares({floats(x), rows, columns, nullptr, nullptr},
                                {floats(row), floats(column), unit}, threads);
}

void factors(uintptr_t row, size_t rows, uintptr_t column, size_t columns, float weight,
             float floor, uintptr_t out_row, uintptr_t out_column) {
  const DefaultArithmetic arithmetic;
  factored_moments::factors({floats(row), rows, floats(column), columns, weight}, floor,
                            floats(out_row), floats(out_column));
}

void reciprocal_factors(uintptr_t row, size_t rows, uintptr_t column, size_t columns, float weight,
                        size_t all_rows, float least, float floor, uintptr_t out_row,
                        uintptr_t out_column) {
  const DefaultArithmetic arithmetic;
  factored_moments::reciprocal_factors({floats(row), rows, floats(column), columns, weight},
                                       all_rows, least, floor, floats(out_row), floats(out_column));
}

void fold(uintptr_t row_sums, size_t rows, uintptr_t column_sums, size_t columns, float decay,
          float weight, uintptr_t row, uintptr_t column) {
  const DefaultArithmetic arithmetic;
  factored_moments::fold({floats(row_sums), rows, floats(column_sums), columns, decay, weight},
                         floats(row), floats(column));
}

void divide(uintptr_t g, size_t rows, size_t columns, uintptr_t row, uintptr_t column,
            uintptr_t momentum, size_t known, float beta, float unit, uintptr_t row_sums,
            uintptr_t column_sums, float sums_unit, float most, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  factored_moments::Divide by;
  by.momentum = floats(momentum);
  by.known = known;
  by.beta = beta;
  by.unit = unit;
  by.squares = {floats(row_sums), floats(column_sums), sums_unit};
  by.most = most;
  factored_moments::divide({floats(g), rows, columns, floats(row), floats(column)}, by, threads);
}

void multiply(uintptr_t x, size_t rows, size_t columns, uintptr_t row, uintptr_t column, float unit,
              int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  factored_moments::multiply({floats(x), rows, columns, floats(row), floats(column)}, unit,
                             threads);
}

void move(uintptr_t x, size_t rows, size_t columns, uintptr_t row, uintptr_t column,
          uintptr_t gradient, uintptr_t momentum, float lr, float keep, float limit, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  factored_moments::Move by;
  by.gradient = floats(gradient);
  by.momentum = floats(momentum);
  by.lr = lr;
  by.keep = keep;
  by.limit = limit;
  factored_moments::move({floats(x), rows, columns, floats(row), floats(column)}, by, threads);
}

void sent(uintptr_t x, size_t rows, size_t columns, uintptr_t row, uintptr_t column,
          uintptr_t before, uintptr_t after, bool residual_bf16, uintptr_t out, bool out_bf16,
          int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  factored_moments::sent({floats(x), rows, columns, floats(row), floats(column)},
                         {pointer(before), pointer(after), residual_bf16, pointer(out), out_bf16},
                         threads);
}

std::pair<double, double> errors(uintptr_t x, uintptr_t residual, bool bf16, size_t numel) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  const factored_moments::Errors found =
      factored_moments::errors(floats(x), pointer(residual), bf16, numel);
  return {found.left, found.coded};
}

/// Addresses of a tensor, its gradient, momentum, squares and steps, and its number of values.
using AdamwTensor = std::array<uintptr_t, 6>;

void adamw_step(const std::vector<AdamwTensor>& tensors, double lr, double beta1, double beta2,
                double eps, double weight_decay, int threads) {
  GilReleased release;
  const DefaultArithmetic arithmetic;
  std::vector<adamw::Tensor> all;
  all.reserve(tensors.size());
  for (const auto& [x, gradient, momentum, squares, steps, numel] : tensors) {
    all.push_back(
        {floats(x), floats(gradient), floats(momentum), floats(squares), floats(steps), numel});
  }
  adamw::step(all, {lr, beta1, beta2, eps, weight_decay}, threads);
}

}  // namespace

void bind_optimizers(py::module_& m) {
  m.def("factored_moments_add_squares", &add_squares);
  m.def("factored_moments_factors", &factors);
  m.def("factored_moments_reciprocal_factors", &reciprocal_factors);
  m.def("factored_moments_fold", &fold);
  m.def("factored_moments_divide", &divide);
  m.def("factored_moments_multiply", &multiply);
  m.def("factored_moments_move", &move);
  m.def("factored_moments_sent", &sent);
  m.def("factored_moments_errors", &errors);
  m.def("adamw_step", &adamw_step);
}

}  // namespace pycomm

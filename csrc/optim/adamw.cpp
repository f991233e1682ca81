#include "optim/adamw.h"

#include <algorithm>
#include <cmath>

#include "optim/spread.h"

namespace pycomm::adamw {
namespace {

/// What all values of a tensor have in common, in the order of the formula.
struct Factors {
  float rest1;  // 1 - beta1
  float beta2, rest2;
  float keep;  // what weight decay leaves
  float lr;    // over the momentum's correction
  float root;  // of the squares' correction
  float eps;
};

PYCOMM_SIMD void step_values(float* x, const float* gradient, float* momentum, float* squares,
                             size_t numel, Factors by) {
  for (size_t i = 0; i < numel; ++i) {
    const float g = gradient[i];
    const float m = momentum[i] + by.rest1 * (g - momentum[i]);
    const float v = squares[i] * by.beta2 + by.rest2 * g * g;
    momentum[i] = m;
    squares[i] = v;
    x[i] = x[i] * by.keep - by.lr * m / (std::sqrt(v) / by.root + by.eps);
  }
}

}  // namespace

void step(const std::vector<Tensor>& tensors, const Settings& settings, int threads) {
  constexpr size_t kPart = size_t{1} << 16;  // values that one thread takes
  struct Part {
    const Tensor* tensor;
    size_t begin;
    Factors by;
  };
  std::vector<Part> parts;
  size_t values = 0;
  for (const Tensor& tensor : tensors) {
    const double steps = static_cast<double>(*tensor.steps += 1);
    Factors by;
    by.rest1 = static_cast<float>(1 - settings.beta1);
    by.beta2 = static_cast<float>(settings.beta2);
    by.rest2 = static_cast<float>(1 - settings.beta2);
    by.keep = static_cast<float>(1 - settings.lr * settings.weight_decay);
    by.lr = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, steps)));
    by.root = static_cast<float>(std::sqrt(1 - std::pow(settings.beta2, steps)));
    by.eps = static_cast<float>(settings.eps);
    values += tensor.numel;
    for (size_t i = 0; i < tensor.numel; i += kPart) parts.push_back({&tensor, i, by});
  }
  spread(parts.size(), values, threads, [&](size_t n) {
    const auto& [tensor, i, by] = parts[n];
    step_values(tensor->values + i, tensor->gradient + i, tensor->momentum + i, tensor->squares + i,
                std::min(kPart, tensor->numel - i), by);
  });
}

}  // namespace pycomm::adamw

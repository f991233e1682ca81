#include "optim/adamw.h"

#include <algorithm>
#include <cmath>

#include "codecs/base/launch.h"
#include "optim/adamw_params.h"
#include "optim/spread.h"

namespace pycomm::adamw {
namespace {

PYCOMM_SIMD void step_values(float* x, const float* gradient, float* momentum, float* squares,
                             size_t numel, Factors by) {
  for (size_t i = 0; i < numel; ++i) step_value(x[i], gradient[i], momentum[i], squares[i], by);
}

/// Adds a step to a tensor's, and returns the factors of its values.
Factors factors_of(const Tensor& tensor, const Settings& settings) {
  const double steps = static_cast<double>(*tensor.steps += 1);
  Factors by;
  by.rest1 = static_cast<float>(1 - settings.beta1);
  by.beta2 = static_cast<float>(settings.beta2);
  by.rest2 = static_cast<float>(1 - settings.beta2);
  by.keep = static_cast<float>(1 - settings.lr * settings.weight_decay);
  by.lr = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, steps)));
  by.root = static_cast<float>(std::sqrt(1 - std::pow(settings.beta2, steps)));
  by.eps = static_cast<float>(settings.eps);
  return by;
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
    const Factors by = factors_of(tensor, settings);
    values += tensor.numel;
    for (size_t i = 0; i < tensor.numel; i += kPart) parts.push_back({&tensor, i, by});
  }
  spread(parts.size(), values, threads, [&](size_t n) {
    const auto& [tensor, i, by] = parts[n];
    step_values(tensor->values + i, tensor->gradient + i, tensor->momentum + i, tensor->squares + i,
                std::min(kPart, tensor->numel - i), by);
  });
}

void step_on_device(const std::vector<Tensor>& tensors, const Settings& settings,
                    const Stream& stream) {
  codecs::Batching batching;
  for (const Tensor& tensor : tensors) {
    StepParams params{};
    params.values = tensor.values;
    params.gradient = tensor.gradient;
    params.momentum = tensor.momentum;
    params.squares = tensor.squares;
    params.numel = tensor.numel;
    params.by = factors_of(tensor, settings);
    batching.row();
    codecs::launch("adamw", "pycomm::adamw::step", params, tensor.numel, cuda::kLanes * kEach,
                   stream);
  }
  batching.start(stream);
}

}  // namespace pycomm::adamw

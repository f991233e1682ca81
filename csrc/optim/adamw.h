// A step of AdamW over many float32 tensors: one pass over the values, and one call for all
// tensors. Models have dozens of small ones, for which calls of single operations cost more than
// arithmetic.
#pragma once
#include <vector>

#include "core/types.h"

namespace pycomm::adamw {

/// A tensor and its state, without gaps.
struct Tensor {
  float* values;
  const float* gradient;
  float* momentum;
  float* squares;
  float* steps;  // one number, to which a step is added
  size_t numel;
};

struct Settings {
  double lr, beta1, beta2, eps, weight_decay;
};

/// Takes a step (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2):
///
///   m <- m + (1 - beta1) (g - m);  v <- beta2 v + (1 - beta2) g^2
///   x <- (1 - lr weight_decay) x - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
///
/// Its bits depend neither on the level of SIMD, nor on threads, nor on a value's place. Torch's
/// can differ in the last one, since its square roots are not rounded correctly on all processors.
PYCOMM_API void step(const std::vector<Tensor>& tensors, const Settings& settings, int threads);

/// The same of tensors on a GPU, with the same bits; their `steps` are on the host.
PYCOMM_API void step_on_device(const std::vector<Tensor>& tensors, const Settings& settings,
                               const Stream& stream);

}  // namespace pycomm::adamw

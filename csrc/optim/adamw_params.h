// A value's step of AdamW (adamw.h), on all processors, and the arguments of its kernel. Compiled
// by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/batch.h"
#include "core/types.h"

namespace pycomm::adamw {

/// What all values of a tensor have in common, in the order of the formula.
struct Factors {
  float rest1;  ///< 1 - beta1
  float beta2, rest2;
  float keep;  ///< what weight decay leaves
  float lr;    ///< over the momentum's correction
  float root;  ///< of the squares' correction
  float eps;
};

PYCOMM_HD void step_value(float& x, float g, float& momentum, float& squares, const Factors& by) {
  const float m = momentum + by.rest1 * (g - momentum);
  const float v = squares * by.beta2 + by.rest2 * g * g;
  momentum = m;
  squares = v;
  x = x * by.keep - by.lr * m / (sqrtf(v) / by.root + by.eps);
}

struct StepParams {
  codecs::Blocks blocks;
  float* values;
  const float* gradient;
  float* momentum;
  float* squares;
  uint64_t numel;
  Factors by;
  uint32_t unused;
};

constexpr size_t kEach = 8;  ///< values of a thread

}  // namespace pycomm::adamw

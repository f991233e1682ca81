// Kernels of float32 and float64, and of complex products (other complex ops are ops on the parts).
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

PYCOMM_SIMD void fold_float32(const Block& block) { fold_float<Float<float>>(block); }
PYCOMM_SIMD void fold_float64(const Block& block) { fold_float<Float<double>>(block); }

PYCOMM_SIMD void fold_complex64_prod(const Block& block) { fold<Complex<float>, Prod>(block); }
PYCOMM_SIMD void fold_complex128_prod(const Block& block) { fold<Complex<double>, Prod>(block); }

}  // namespace pycomm::kernels

// Kernels of float32 and float64, and of complex products (other complex ops are ops on the parts).
#include "core/reduce_kernels.h"

namespace pycomm::kernels {

PYCOMM_SIMD void fold_float32(const Block& block) { fold_numbers<Float<float>>(block); }
PYCOMM_SIMD void fold_float64(const Block& block) { fold_numbers<Float<double>>(block); }

// Not PYCOMM_SIMD: gcc 12 turns the alternating minus and plus of a complex product into vfmaddsub
// even under -ffp-contract=off, which rounds once instead of twice.
void fold_complex64_prod(const Block& block) { fold<Complex<float>, Prod>(block); }
void fold_complex128_prod(const Block& block) { fold<Complex<double>, Prod>(block); }

}  // namespace pycomm::kernels

// Reductions: selects the kernel of a dtype and op and runs it over the buffers, block by block.
#include "core/reduce.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/error.h"
#include "core/op.h"
#include "core/reduce_kernels.h"

namespace pycomm {
namespace {

using kernels::Kernel;

/// Kernel of a reduction and its arguments.
struct Plan {
  Kernel kernel;
  ReduceOp op;
  size_t numel;
  size_t element_bytes;
};

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

bool is_integer(DType dtype) { return dtype >= DType::int8 && dtype <= DType::uint64; }

/// Returns the op on bytes of 0 and 1 with the same meaning.
ReduceOp bit_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
      return ReduceOp::bor;
    case ReduceOp::prod:
    case ReduceOp::min:
      return ReduceOp::band;
    default:
      return op;
  }
}

// By dtype; bools are reduced as bytes, and of complex numbers only products as they are.
constexpr Kernel kKernels[] = {
    kernels::fold_float32,        kernels::fold_float64,        kernels::fold_float16,
    kernels::fold_bfloat16,       kernels::fold_float8_e4m3,    kernels::fold_float8_e5m2,
    kernels::fold_int8,           kernels::fold_int16,          kernels::fold_int32,
    kernels::fold_int64,          kernels::fold_uint8,          kernels::fold_uint16,
    kernels::fold_uint32,         kernels::fold_uint64,         nullptr,
    kernels::fold_complex64_prod, kernels::fold_complex128_prod};
static_assert(sizeof kKernels / sizeof *kKernels == kDTypes);

Plan plan(DType dtype, ReduceOp op, size_t numel) {
  const Lowered lowered = lower(dtype, op);
  const auto dtype_number = static_cast<size_t>(lowered.dtype);
  return {is_bitwise(lowered.op) ? kernels::fold_bits : kKernels[dtype_number], lowered.op,
          numel * lowered.times, size_of(lowered.dtype)};
}

/// Runs a plan over the buffers. The inputs, their count and the numbers are those of `block`.
void run(const Plan& plan, kernels::Block block, void* out, void* copy) {
  block.op = plan.op;
  for (size_t begin = 0; begin < plan.numel; begin += kernels::kBlock) {
    block.offset = begin * plan.element_bytes;
    block.out = static_cast<char*>(out) + block.offset;
    block.numel = std::min(kernels::kBlock, plan.numel - begin);
    plan.kernel(block);
    if (copy) {
      // The copy reads from the first-level cache, which is as fast as a second store in the loop.
      std::memcpy(static_cast<char*>(copy) + block.offset, block.out,
                  block.numel * plan.element_bytes);
    }
  }
}

bool has_meaning(DType dtype, ReduceOp op) {
  if (dtype == DType::boolean) return op != ReduceOp::avg && op != ReduceOp::premul_sum;
  if (is_complex(dtype)) return op <= ReduceOp::prod;
  if (is_integer(dtype)) return op != ReduceOp::premul_sum;
  return !is_bitwise(op);
}

// Inf and NaN have all exponent bits set; an integer maximum over the magnitudes vectorises.
PYCOMM_SIMD bool finite_block(const float* x, size_t n) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  return top < 0x7f800000u;
}

}  // namespace

void check_reducible(DType dtype, ReduceOp op) {
  if (static_cast<uint8_t>(dtype) >= kDTypes || static_cast<uint8_t>(op) >= kReduceOps ||
      !has_meaning(dtype, op)) {
    throw Error(std::string(name(op)) + " has no meaning for " + name(dtype));
  }
}

Lowered lower(DType dtype, ReduceOp op) {
  if (dtype == DType::boolean || is_bitwise(op)) return {DType::uint8, bit_op(op), size_of(dtype)};
  if (is_complex(dtype) && op != ReduceOp::prod) {
    return {dtype == DType::complex64 ? DType::float32 : DType::float64, op, 2};
  }
  return {dtype, op, 1};
}

void reduce(const ReduceArgs& args) {
  check_reducible(args.dtype, args.op);
  const DefaultArithmetic arithmetic;
  if (args.count < 1 || args.count > kernels::kMaxInputs) {
    throw Error("reduce takes 1 to " + std::to_string(kernels::kMaxInputs) + " inputs, not " +
                std::to_string(args.count));
  }
  const ReduceOp op = args.op == ReduceOp::premul_sum ? ReduceOp::sum : args.op;
  const Plan plan = pycomm::plan(args.dtype, op, args.numel);
  const int divisor = args.divisor > 0 ? args.divisor : args.count;
  const bool divides = op == ReduceOp::avg && divisor != 1;
  if (args.count == 1 && !divides) {
    const size_t bytes = plan.numel * plan.element_bytes;
    std::memmove(args.out, args.inputs[0], bytes);
    if (args.copy) std::memcpy(args.copy, args.out, bytes);
    return;
  }
  kernels::Block block;
  block.inputs = args.inputs;
  block.count = args.count;
  block.divisor = divisor;
  run(plan, block, args.out, args.copy);
}

void scale(DType dtype, const void* in, void* out, size_t numel, double factor) {
  check_reducible(dtype, ReduceOp::premul_sum);
  const DefaultArithmetic arithmetic;
  kernels::Block block;
  block.inputs = &in;
  block.count = 1;
  block.factor = factor;
  run(plan(dtype, ReduceOp::premul_sum, numel), block, out, nullptr);
}

bool all_finite(Span<const float> x) {
  constexpr size_t kStep = 16384;
  for (size_t begin = 0; begin < x.size; begin += kStep) {
    if (!finite_block(x.data + begin, std::min(kStep, x.size - begin))) return false;
  }
  return true;
}

}  // namespace pycomm

// Launch of the collective kernels: on a GPU's stream, or on the CPU within the call.
#include "collectives/device/calls.h"

#include "codecs/base/launch.h"
#include "collectives/device/move.h"
#include "collectives/device/reduce.h"
#include "core/arithmetic.h"

namespace pycomm::device {
namespace {

/// Runs blocks one after the other: the peers' come in the same order.
template <typename Run>
void each_block(int blocks, const Run& run) {
  const DefaultArithmetic arithmetic;
  for (int b = 0; b < blocks; b++) run(Cpu{b, blocks});
}

bool is_bits(ReduceOp op) { return op >= ReduceOp::band; }

}  // namespace

void start(const MoveCall& call, int blocks, Stream stream) {
  if (stream.device == Device::cuda) return gpu::move(call, blocks, stream);
  each_block(blocks, [&](const Cpu& m) { move(m, call); });
}

void start(const SpoilCall& call, int blocks, Stream stream) {
  if (stream.device == Device::cuda) return gpu::spoil(call, blocks, stream);
  each_block(blocks, [&](const Cpu& m) { spoil_if_broken(m, call); });
}

void start(const ReduceCall& call, DType dtype, int blocks, Stream stream) {
  const bool cuda = stream.device == Device::cuda;
  const auto run = [&](auto kernel) {
    each_block(blocks, [&](const Cpu& m) { decltype(kernel)::run(m, call); });
  };
  if (is_bits(call.op)) return cuda ? gpu::reduce_bits(call, blocks, stream) : run(BitsKernel{});
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float8_e4m3:
    case DType::float8_e5m2:
      if (cuda) return gpu::reduce_small_float(call, dtype, blocks, stream);
      return visit_small_float(dtype, run);
    case DType::float32:
    case DType::float64:
    case DType::complex64:
    case DType::complex128:
      if (cuda) return gpu::reduce_float(call, dtype, blocks, stream);
      return visit_float(dtype, run);
    default:
      if (cuda) return gpu::reduce_integer(call, dtype, blocks, stream);
      return visit_integer(dtype, run);
  }
}

void load_kernels(bool coded) {
  gpu::load_move();
  gpu::load_float();
  gpu::load_small_float();
  gpu::load_integer();
  if (coded) codecs::load_kernels();
}

}  // namespace pycomm::device

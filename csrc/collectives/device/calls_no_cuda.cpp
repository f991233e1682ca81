// Collective kernels in a build without CUDA.
#include "collectives/device/calls.h"
#include "core/error.h"

namespace pycomm::device::gpu {
namespace {

[[noreturn]] void fail() {
  throw Error("collectives on cuda: this pycomm was built without CUDA; install pycomm-cuda13");
}

}  // namespace

void move(const MoveCall&, int, Stream) { fail(); }
void spoil(const SpoilCall&, int, Stream) { fail(); }
void reduce_bits(const ReduceCall&, int, Stream) { fail(); }
void reduce_float(const ReduceCall&, DType, int, Stream) { fail(); }
void reduce_small_float(const ReduceCall&, DType, int, Stream) { fail(); }
void reduce_integer(const ReduceCall&, DType, int, Stream) { fail(); }

void load_move() { fail(); }
void load_float() { fail(); }
void load_small_float() { fail(); }
void load_integer() { fail(); }

}  // namespace pycomm::device::gpu

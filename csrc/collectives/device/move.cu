// Collectives that move data, and reductions of bits, on a GPU. The kernels are in device/move.h
// and device/reduce.h.
#include "collectives/device/launch.h"
#include "collectives/device/move.h"

namespace pycomm::device::gpu {
namespace {

__global__ void __launch_bounds__(kThreads, 1) move_kernel(const __grid_constant__ MoveCall args) {
  device::move(Gpu{}, args);
}

__global__ void __launch_bounds__(kThreads, 1)
    spoil_kernel(const __grid_constant__ SpoilCall args) {
  spoil_if_broken(Gpu{}, args);
}

}  // namespace

void move(const MoveCall& call, int blocks, Stream stream) {
  launch(move_kernel, call, blocks, stream);
}

void spoil(const SpoilCall& call, int blocks, Stream stream) {
  launch(spoil_kernel, call, blocks, stream);
}

void reduce_bits(const ReduceCall& call, int blocks, Stream stream) {
  Launch{call, blocks, stream}(BitsKernel{});
}

void load_move() {
  load(move_kernel);
  load(spoil_kernel);
  Load{}(BitsKernel{});
}

}  // namespace pycomm::device::gpu

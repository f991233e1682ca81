// Averages on a GPU: sums that are divided where they lie.
#include "collectives/device_launch.h"
#include "core/cuda_launch.h"

namespace pycomm::device::gpu {
namespace {

struct DivideParams {
  float* x;
  uint64_t numel;
  float by;
};

constexpr int kRows = 4;

__global__ void __launch_bounds__(cuda::kThreads) divide_kernel(const DivideParams args) {
  const cuda::Tile<kRows> tile(args.numel, args.x);
  if (tile.empty()) return;
  cuda::Vector<float> value[kRows];
  tile.load(args.x, value);
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < cuda::kVector; k++) value[row].v[k] = value[row].v[k] / args.by;
  }
  tile.store(args.x, args.numel, value);
}

}  // namespace

void divide(Span<float> x, float by, Stream stream) {
  const DivideParams params{x.data, x.size, by};
  cuda::launch("divide", divide_kernel, params, x.size, kRows * cuda::kRow, stream);
}

void load_divide() { load(divide_kernel); }

}  // namespace pycomm::device::gpu

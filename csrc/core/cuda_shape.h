// Shape of every launch of the codecs: a block of kThreads threads, warps whose lanes take vectors
// of four neighbouring values, rows of kRow values. Compiled by gcc, nvcc and NVRTC.
#pragma once

namespace pycomm::cuda {

constexpr int kLanes = 32;
constexpr int kVector = 4;
constexpr int kRow = kLanes * kVector;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;

}  // namespace pycomm::cuda

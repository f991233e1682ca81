// Batch: the argument of every kernel of the codecs: what one launch does, for one tensor or for
// several. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "core/types.h"

namespace pycomm::codecs {

/// First member of the arguments for a tensor: the blocks of threads that work on it.
struct Blocks {
  uint32_t first;  ///< among the blocks of the launch
  uint32_t count;
};

/// The most bytes of a kernel's argument on every GPU.
constexpr size_t kArgumentBytes = 4096;

/// What precedes the arguments for the tensors.
struct BatchHead {
  uint64_t count;        ///< of tensors
  const float* swapped;  ///< not null, and not 0: residuals are read where they would be written
};

/// Returns for how many tensors arguments of `bytes` each fit into one launch.
constexpr size_t batch_room(size_t bytes) { return (kArgumentBytes - sizeof(BatchHead)) / bytes; }

/// Arguments for tensors, in the order of their blocks.
template <typename Params>
struct Batch {
  BatchHead head;
  Params tensors[batch_room(sizeof(Params))];
};

}  // namespace pycomm::codecs

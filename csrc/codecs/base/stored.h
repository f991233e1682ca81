// Stored forms of residuals (docs/feedback.md): what decides a bit, and the arguments of the
// kernels that load and store them. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/batch.h"
#include "codecs/base/block.h"
#include "core/floats.h"

namespace pycomm::codecs::stored {

/// The forms. Numbers as those of feedback::Storage.
constexpr uint32_t kFloat32 = 0, kInt8 = 1;

/// Values of a block of the form int8, which is a float32 scale, then the codes.
constexpr uint32_t kBlock = 32;
constexpr size_t kBlockBytes = sizeof(float) + kBlock;
constexpr float kTop = 127.0f;

/// The code of a value of a block, whose largest code per value is `inv`.
PYCOMM_HD int8_t code_of(float x, float inv) { return static_cast<int8_t>(round_nearest(x * inv)); }
PYCOMM_HD float value_of(int8_t code, float scale) { return static_cast<float>(code) * scale; }

/// The scale of a block. One that is too large for a float32 scale is dropped: it would make every
/// later step overflow.
PYCOMM_HD float scale_of(float amax) { return used(amax) ? amax / kTop : 0.0f; }

// The forms; those of single values say how.

struct Float32 {
  static constexpr bool kBlocks = false;
  using Code = float;
  PYCOMM_HD static float decode(Code code) { return code; }
  PYCOMM_HD static Code encode(float x) { return x; }
};
struct Int8 {
  static constexpr bool kBlocks = true;
  using Code = uint32_t;  ///< of four values
};

constexpr int kRows = 4;  ///< of a warp's tile

struct LoadParams {
  Blocks blocks;
  const uint8_t* stored;
  const uint8_t* other_side;  ///< in place of `stored`, if the batch says so
  float* out;
  uint64_t numel;
  float decay;  ///< the values are multiplied by this
};

struct StoreParams {
  Blocks blocks;
  const float* in;
  uint8_t* stored;
  uint8_t* other_side;
  uint64_t numel;
};

}  // namespace pycomm::codecs::stored

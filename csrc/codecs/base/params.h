// Arguments of the CUDA kernels, one struct for each kernel, and the sizes of a warp's tile. The
// .cpp of a codec fills them in. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/batch.h"
#include "codecs/base/block.h"
#include "core/cuda_shape.h"
#include "core/types.h"

namespace pycomm::codecs {

/// Arguments of every encode kernel of the codecs with one kernel.
struct EncodeParams {
  Blocks blocks;
  const float* in;
  const uint8_t* residual;  ///< in its stored form
  uint8_t* new_residual;
  float* scales;
  uint8_t* codes;
  const uint8_t*
      payloads;  ///< of `ranks` contributions, whose average is the input in place of `in`
  uint64_t stride;
  uint64_t numel;
  uint64_t seed;
  uint64_t group;  ///< place of in[0] in its tensor / 4: the counter of its random words
  uint32_t step;
  uint32_t tensor;
  uint32_t block_bits;     ///< a block has 1 << block_bits values
  uint32_t options;        ///< of the codec
  uint32_t ranks;          ///< 0: the input is `in`
  float divisor;           ///< of the sum of contributions
  uint32_t form;           ///< of the residuals (stored.h)
  float decay;             ///< of the residuals that are read
  uint32_t* header;        ///< eden: start of a payload
  uint64_t key;            ///< eden: seed of the signs
  uint32_t rotation_bits;  ///< eden: a rotation has 1 << rotation_bits values
  uint32_t swapped;        ///< not 0: the residuals are exchanged; see BatchHead
};

/// Arguments of every decode kernel of the codecs with one kernel.
struct DecodeParams {
  Blocks blocks;
  const float* scales;
  const uint8_t* codes;
  float* out;
  uint64_t numel;
  uint32_t block_bits;
  uint32_t options;
  const uint32_t* header;  ///< as when encoding
  uint32_t rotation_bits;
  uint32_t add;  ///< eden: 1 if values are added to out
};

/// Arguments that all kernels of a codec with several share; its own struct adds to them.
struct StagedParams {
  Blocks blocks;
  const float* in;
  const float* residual;
  float* new_residual;
  float* out;  ///< of decoding
  uint8_t* payload;
  uint8_t* scratch;
  uint64_t numel;
};

/// Blocks of up to 512 values fit in a tile of kSmall rows; a tile of kLarge rows takes any.
constexpr int kSmall = 4;
constexpr int kLarge = kMaxBlock / cuda::kRow;

}  // namespace pycomm::codecs

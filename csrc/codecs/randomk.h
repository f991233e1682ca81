// randomk: one value, or one block of neighbours, in every stretch of many, chosen by the key that
// all ranks share. Wire format: docs/wire/randomk.md. Everything that determines the bits is here
// and in block.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/block.h"
#include "core/cuda_shape.h"
#include "core/philox.h"
#include "core/types.h"

namespace pycomm::codecs::randomk {

constexpr int kWireVersion = 1;
constexpr uint32_t kMaxEvery = 65536;
constexpr uint32_t kLargestBlock = 4096;

struct Format {
  uint32_t every = 100;  ///< one block in this many travels
  uint32_t block = 1;    ///< values
  bool unbiased = false;
};

/// Header of a payload, from which its places follow.
struct Header {
  uint64_t seed;
  uint64_t first;  ///< number of the first stretch in its tensor
  uint32_t step;
  uint32_t tensor;
};
constexpr size_t kHeader = sizeof(Header);

/// Returns the values of a stretch: one of its blocks travels.
PYCOMM_HD size_t stretch_of(const Format& f) { return size_t{f.every} * f.block; }

PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  if (numel == 0) return 0;
  const size_t rest = numel % stretch_of(f);
  return kHeader + 4 * (numel / stretch_of(f) * f.block + (rest < f.block ? rest : f.block));
}

/// The block that travels of a stretch of `length` values.
struct Choice {
  uint32_t blocks;  ///< of the stretch, of which one was chosen
  uint32_t first;   ///< of the chosen block: its first value
  uint32_t size;    ///< its values: fewer than `block` in the last block of a tensor
  uint32_t slot;    ///< values that the payload has for it
};

PYCOMM_HD Choice choose(const Format& f, size_t length, uint32_t random) {
  const auto n = static_cast<uint32_t>(length);
  const uint32_t blocks = (n + f.block - 1) / f.block;
  const auto chosen = static_cast<uint32_t>(uint64_t{random} * blocks >> 32);
  const uint32_t first = chosen * f.block;
  const uint32_t size = n - first < f.block ? n - first : f.block;
  return {blocks, first, size, n < f.block ? n : f.block};
}

/// Returns the value that travels for p.
PYCOMM_HD float scaled(float p, uint32_t blocks, bool scales) {
  return scales ? p * static_cast<float>(blocks) : p;
}

// ---------------------------------------------------------- kernels in CUDA

/// Returns the lanes that share a stretch: a power of two, and several values for each, since all
/// of them compute its random word.
PYCOMM_HD uint32_t lanes_of(size_t stretch) {
  uint32_t lanes = 1;
  while (lanes < cuda::kLanes && size_t{lanes} * 8 <= stretch) lanes *= 2;
  return lanes;
}

/// `options` of the kernels: `every` in 17 bits, `block` in 13, then if values are scaled.
constexpr int kBlockAt = 17;
constexpr int kScalesAt = 30;

PYCOMM_HD uint32_t pack(const Format& f, bool scales) {
  return f.every | f.block << kBlockAt | (scales ? 1u << kScalesAt : 0);
}
PYCOMM_HD Format unpack(uint32_t options) {
  Format f;
  f.every = options & ((1u << kBlockAt) - 1);
  f.block = options >> kBlockAt & ((1u << (kScalesAt - kBlockAt)) - 1);
  f.unbiased = options >> kScalesAt != 0;
  return f;
}

}  // namespace pycomm::codecs::randomk

// CPU loops that the codecs share. Everything here is inlined into the PYCOMM_SIMD functions of the
// codecs and compiled once per x86 level with them.
#pragma once
#include <cstring>

#include "codecs/base/block.h"
#include "codecs/base/codec.h"
#include "codecs/base/feedback.h"
#include "codecs/base/random.h"

#define PYCOMM_INLINE [[gnu::always_inline]] inline

namespace pycomm::codecs {

PYCOMM_INLINE float max_magnitude(const float* __restrict x, size_t n) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t bits = magnitude_bits(x[i]);
    top = bits > top ? bits : top;
  }
  return bits_float(top);
}

/// Decodes a block of the stored form int8.
PYCOMM_INLINE void load_block(const uint8_t* __restrict in, float* __restrict out) {
  float scale;
  std::memcpy(&scale, in, sizeof scale);
  const auto* const codes = reinterpret_cast<const int8_t*>(in + sizeof scale);
  for (size_t i = 0; i < stored::kBlock; i++) out[i] = stored::value_of(codes[i], scale);
}

PYCOMM_INLINE void store_block(const float* __restrict in, uint8_t* __restrict out) {
  const float amax = max_magnitude(in, stored::kBlock);
  const float scale = stored::scale_of(amax), inv = inv_scale(amax, stored::kTop);
  std::memcpy(out, &scale, sizeof scale);
  auto* const codes = reinterpret_cast<int8_t*>(out + sizeof scale);
  if (!used(amax)) {
    std::memset(codes, 0, stored::kBlock);
    return;
  }
  for (size_t i = 0; i < stored::kBlock; i++) codes[i] = stored::code_of(in[i], inv);
}

/// Computes p = x + residual; returns the largest |p|.
PYCOMM_INLINE float add_max_magnitude(const float* __restrict x, const float* __restrict residual,
                                      size_t n, float* __restrict p) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; i++) {
    p[i] = x[i] + residual[i];
    const uint32_t bits = magnitude_bits(p[i]);
    top = bits > top ? bits : top;
  }
  return bits_float(top);
}

/// Prefetches what the third block from value `lo` on will read: the passes over a block come in
/// bursts that the hardware prefetcher does not follow. Encoding with a residual becomes a quarter
/// faster.
PYCOMM_INLINE void prefetch_block(const EncodeArgs& args, size_t lo, size_t block) {
  if (args.in.size - lo < 4 * block) return;
  for (size_t i = lo + 3 * block; i < lo + 4 * block; i += 16) {
    __builtin_prefetch(args.in.data + i);
    if (args.residual) __builtin_prefetch(args.residual + i);
  }
}

/// Residuals of one block at a time, of kMost values and less: where they are, or in buffers if
/// they are stored otherwise.
template <uint32_t kMost = kMaxBlock>
class BlockResiduals {
 public:
  PYCOMM_INLINE explicit BlockResiduals(const EncodeArgs& args) : args_(args) {}

  /// Returns those of `n` values from value lo on.
  PYCOMM_INLINE const float* load(size_t lo, size_t n) {
    const StoredResidual& stored = args_.stored;
    if (!stored.old) return args_.residual + lo;
    feedback::load(storage(), stored.old + feedback::stored_bytes(storage(), lo), {old_, n});
    if (stored.decay != 1.0f) {
      for (size_t i = 0; i < n; i++) old_[i] = stored.decay * old_[i];
    }
    return old_;
  }
  /// Returns where the new ones of these values are written before store().
  PYCOMM_INLINE float* fresh(size_t lo) {
    return args_.stored.old ? fresh_ : args_.new_residual + lo;
  }
  PYCOMM_INLINE void store(size_t lo, size_t n) {
    if (!args_.stored.old) return;
    uint8_t* const to = args_.stored.fresh + feedback::stored_bytes(storage(), lo);
    feedback::store(storage(), {fresh_, n}, to);
  }

 private:
  PYCOMM_INLINE feedback::Storage storage() const {
    return static_cast<feedback::Storage>(args_.stored.form);
  }

  const EncodeArgs& args_;
  alignas(64) float old_[kMost];
  alignas(64) float fresh_[kMost];
};

/// Encodes block after block, each while it is in the first-level cache. A Writer has
///   scale(block, amax)   returns the scale of a block, and writes it
///   write<kFeedback>(offset, p, n, scale, new_residual)   codes of a used block, and with feedback
///                        its new residual; offset is in values
///   zero(offset, n)      codes of a block that is not used
/// A block's new residual is written after its residual has been read, so they may be one buffer.
template <typename Writer>
PYCOMM_INLINE void encode_blocks(const EncodeArgs& args, uint32_t block, const Writer& writer) {
  const size_t numel = args.in.size;
  const auto count = [&](size_t lo) { return numel - lo < block ? numel - lo : block; };
  if (!args.has_residual()) {
    for (size_t lo = 0, index = 0; lo < numel; lo += block, index++) {
      const size_t n = count(lo);
      const float* const x = args.in.data + lo;
      prefetch_block(args, lo, block);
      const Scale scale = writer.scale(index, max_magnitude(x, n));
      scale.used ? writer.template write<false>(lo, x, n, scale, nullptr) : writer.zero(lo, n);
    }
    return;
  }
  alignas(64) float sum[kMaxBlock];
  BlockResiduals<> residuals(args);
  for (size_t lo = 0, index = 0; lo < numel; lo += block, index++) {
    const size_t n = count(lo);
    prefetch_block(args, lo, block);
    const float* const residual = residuals.load(lo, n);
    const Scale scale = writer.scale(index, add_max_magnitude(args.in.data + lo, residual, n, sum));
    if (scale.used) {
      writer.template write<true>(lo, sum, n, scale, residuals.fresh(lo));
    } else {
      writer.zero(lo, n);
      // The residual of a tiny block is all of p; a block that is not finite keeps its old
      // residual.
      std::memmove(residuals.fresh(lo), scale.unit == 0.0f ? sum : residual, n * 4);
    }
    residuals.store(lo, n);
  }
}

inline void zero_padding(Span<uint8_t> section, size_t used_bytes) {
  if (section.size == used_bytes) return;  // memset must not get a null pointer, even of no bytes
  std::memset(section.data + used_bytes, 0, section.size - used_bytes);
}

}  // namespace pycomm::codecs

// CPU loops that the codecs share. Everything here is inlined into the PYCOMM_SIMD functions of the
// codecs and compiled once per x86 level with them.
#pragma once
#include <cstring>
#include <type_traits>

#include "codecs/base/bits.h"
#include "codecs/base/block.h"
#include "codecs/base/codec.h"
#include "codecs/base/feedback.h"
#include "codecs/base/random.h"

#define PYCOMM_INLINE [[gnu::always_inline]] inline

namespace pycomm::codecs {

/// Calls f with a number of bits, from 1 to kMost, as a type.
template <int kMost, typename F>
PYCOMM_INLINE void with_bits(int bits, const F& f) {
  if (bits == kMost) return f(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_bits<kMost - 1>(bits, f);
}

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
  const float* const residual = args.residual.floats();
  for (size_t i = lo + 3 * block; i < lo + 4 * block; i += 16) {
    __builtin_prefetch(args.in.data + i);
    if (residual) __builtin_prefetch(residual + i);
  }
}

/// Residuals of one block at a time, of kMost values and less: where they are, or in buffers if
/// they are not plain.
template <uint32_t kMost = kMaxBlock>
class BlockResiduals {
 public:
  PYCOMM_INLINE explicit BlockResiduals(const EncodeArgs& args)
      : residual_(args.residual), storage_(static_cast<feedback::Storage>(residual_.form)) {}

  /// Returns those of `n` values from value lo on.
  PYCOMM_INLINE const float* load(size_t lo, size_t n) {
    if (residual_.plain()) return residual_.floats() + lo;
    feedback::load(storage_, residual_.old + feedback::stored_bytes(storage_, lo), {old_, n});
    if (residual_.decay != 1.0f) {
      for (size_t i = 0; i < n; i++) old_[i] = residual_.decay * old_[i];
    }
    return old_;
  }
  /// Returns where the new ones of these values are written before store().
  PYCOMM_INLINE float* fresh(size_t lo) {
    return residual_.plain() ? residual_.fresh_floats() + lo : fresh_;
  }
  PYCOMM_INLINE void store(size_t lo, size_t n) {
    if (residual_.plain()) return;
    uint8_t* const to = residual_.fresh + feedback::stored_bytes(storage_, lo);
    feedback::store(storage_, {fresh_, n}, to);
  }

 private:
  const Residual residual_;
  const feedback::Storage storage_;
  alignas(64) float old_[kMost];
  alignas(64) float fresh_[kMost];
};

inline void zero_padding(Span<uint8_t> section, size_t used_bytes) {
  if (section.size == used_bytes) return;  // memset must not get a null pointer, even of no bytes
  std::memset(section.data + used_bytes, 0, section.size - used_bytes);
}

/// Codes of blocks with a scale each. A payload is the scales, then the codes.
struct BlockCodes {
  uint32_t block;  ///< values of a block
  int bits;        ///< of a code
  size_t offset;   ///< bytes of the scales

  /// Returns the values of the block that begins at `lo`.
  PYCOMM_INLINE size_t count(size_t numel, size_t lo) const {
    return numel - lo < block ? numel - lo : block;
  }
};

/// Writes the codes of a block, a byte each, and with feedback its new residual.
template <bool kFeedback, typename Round>
PYCOMM_INLINE void encode_block(const float* __restrict p, size_t n, Scale s, const Round& round,
                                uint8_t* __restrict codes, float* __restrict new_residual) {
  for (size_t i = 0; i < n; i++) {
    const Rounded rounded = round(i, p[i] * s.inv);
    codes[i] = static_cast<uint8_t>(rounded.code);
    if (kFeedback) new_residual[i] = p[i] - rounded.value * s.unit;
  }
}

/// Encodes block after block, each while it is in the first-level cache. `begin(lo, n)` is called
/// for the n values from `lo` on before `round(i, v)` returns the code of value lo + i, which is v
/// times the scale. A block's new residual is written after its residual has been read, so they may
/// be one buffer. Codes are packed kMaxBlock at a time: a call for each small block would take
/// longer than the packing.
template <bool kFeedback, typename Begin, typename Round>
PYCOMM_INLINE void encode_blocks(const EncodeArgs& args, const BlockCodes& codes, float top,
                                 const Begin& begin, const Round& round) {
  alignas(64) uint8_t tile[kMaxBlock];
  alignas(64) float sum[kMaxBlock];
  BlockResiduals<> residuals(args);
  const size_t numel = args.in.size;
  auto* scales = reinterpret_cast<float*>(args.out.data);
  uint8_t* const out = args.out.data + codes.offset;
  for (size_t lo = 0; lo < numel; lo += codes.block) {
    const size_t n = codes.count(numel, lo), end = lo + n;
    prefetch_block(args, lo, codes.block);
    const float* p = args.in.data + lo;
    const float* const residual = kFeedback ? residuals.load(lo, n) : nullptr;
    float* const new_residual = kFeedback ? residuals.fresh(lo) : nullptr;
    const float amax = kFeedback ? add_max_magnitude(p, residual, n, sum) : max_magnitude(p, n);
    if (kFeedback) p = sum;
    const Scale s = symmetric_scale(amax, top);
    *scales++ = s.unit;
    uint8_t* const to = codes.bits == 8 ? out + lo : tile + lo % kMaxBlock;
    if (s.used) {
      begin(lo, n);
      encode_block<kFeedback>(p, n, s, round, to, new_residual);
    } else {
      std::memset(to, 0, n);
      // The residual of a tiny block is all of p; a block that is not finite keeps its old
      // residual.
      if constexpr (kFeedback) std::memmove(new_residual, s.unit == 0.0f ? p : residual, n * 4);
    }
    if (kFeedback) residuals.store(lo, n);
    if (codes.bits == 8 || (end % kMaxBlock != 0 && end != numel)) continue;
    const size_t first = (end - 1) / kMaxBlock * kMaxBlock;
    pack(codes.bits, tile, end - first, out + first * codes.bits / 8);
  }
  zero_padding(args.out, codes.offset + (numel * codes.bits + 7) / 8);
}

/// Decodes them: `decode(code)` is a value that is yet to be multiplied by the scale.
template <bool kAdd, typename Decode>
PYCOMM_INLINE void decode_blocks(Span<const uint8_t> payload, Span<float> out,
                                 const BlockCodes& codes, const Decode& decode) {
  alignas(64) uint8_t tile[kMaxBlock];
  const auto* scales = reinterpret_cast<const float*>(payload.data);
  const uint8_t* const in = payload.data + codes.offset;
  for (size_t lo = 0; lo < out.size; lo += codes.block) {
    const size_t n = codes.count(out.size, lo), left = out.size - lo;
    if (codes.bits != 8 && lo % kMaxBlock == 0) {
      unpack(codes.bits, in + lo * codes.bits / 8, left < kMaxBlock ? left : kMaxBlock, tile);
    }
    const float unit = *scales++;
    const uint8_t* __restrict from = codes.bits == 8 ? in + lo : tile + lo % kMaxBlock;
    float* __restrict to = out.data + lo;
    for (size_t i = 0; i < n; i++) {
      const float value = decode(from[i]) * unit;
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

}  // namespace pycomm::codecs

// eden on the CPU: plain loops over eden.h, compiled for several x86 levels.
#include "codecs/eden.h"

#include <cmath>
#include <cstring>

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/options.h"
#include "codecs/base/targets.h"
#include "codecs/rotation/loops.h"

namespace pycomm::codecs::eden {
namespace {

constexpr size_t kHeaderBytes = sizeof(RotationHeader);

/// Adds each half to the other until one number is left.
PYCOMM_INLINE float add_halves(float* terms, uint32_t n) {
  for (uint32_t width = n / 2; width > 0; width /= 2) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < width; i++) terms[i] = terms[i] + terms[i + width];
  }
  return terms[0];
}

#ifdef PYCOMM_AVX2

// Codes of 3 and 4 bits: the levels are in one vector, from which a permutation takes those of
// eight places. It reads three bits of a place: with 3 bits the third is the sign, and the levels
// repeat.

template <int kBits>
PYCOMM_AVX2 inline __m256 level_table() {
  alignas(32) float levels[8];
  for (int place = 0; place < 8; place++) levels[place] = level(kBits, place % num_levels(kBits));
  return _mm256_load_ps(levels);
}

/// Writes codes, a byte each, and the products of what they represent and the values.
template <int kBits>
PYCOMM_AVX2 void code_avx2(const float* __restrict y, float inv, uint32_t size,
                           uint8_t* __restrict codes, float* __restrict terms) {
  const __m256 table = level_table<kBits>();
  const __m256 minus = _mm256_set1_ps(-0.0f);
  for (uint32_t i = 0; i < size; i += 8) {
    const __m256 value = _mm256_loadu_ps(y + i);
    const __m256 magnitude = _mm256_andnot_ps(minus, value * _mm256_set1_ps(inv));
    __m256i place = _mm256_setzero_si256();
    for (int k = 0; k < num_levels(kBits) - 1; k++) {
      const __m256 beyond = _mm256_cmp_ps(magnitude, _mm256_set1_ps(border(kBits, k)), _CMP_GE_OQ);
      place = _mm256_sub_epi32(place, _mm256_castps_si256(beyond));
    }
    const __m256 sign = _mm256_and_ps(value, minus);
    const __m256 decoded = _mm256_or_ps(_mm256_permutevar8x32_ps(table, place), sign);
    _mm256_storeu_ps(terms + i, decoded * value);
    const __m256i top = _mm256_srli_epi32(_mm256_castps_si256(sign), 32 - kBits);
    const __m256i code = _mm256_or_si256(place, top);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packus_epi16(words, words));
  }
}

/// Decodes codes, a byte each.
template <int kBits>
PYCOMM_AVX2 void decode_avx2(const uint8_t* __restrict codes, float scale, uint32_t size,
                             float* __restrict y) {
  const __m256 table = level_table<kBits>();
  for (uint32_t i = 0; i < size; i += 8) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, kBits - 1), 31);
    const __m256 value = _mm256_permutevar8x32_ps(table, code);
    _mm256_storeu_ps(y + i,
                     _mm256_xor_ps(value, _mm256_castsi256_ps(sign)) * _mm256_set1_ps(scale));
  }
}

#endif

/// Writes codes, a byte each, and the products of what they represent and the values.
template <int kBits>
PYCOMM_INLINE void code_values(const float* __restrict y, float inv, uint32_t size,
                               uint8_t* __restrict codes, float* __restrict terms) {
#ifdef PYCOMM_AVX2
  if (kBits > 2 && has_avx2()) return code_avx2<kBits>(y, inv, size, codes, terms);
#endif
  for (uint32_t i = 0; i < size; i++) {
    const Coded coded = quantize<kBits>(y[i], inv);
    codes[i] = static_cast<uint8_t>(coded.code);
    terms[i] = coded.value * y[i];
  }
}

/// Writes the codes of a used rotation; returns its scale.
template <int kBits>
PYCOMM_INLINE float write_block(float* __restrict y, int size_bits, float amax, bool mmse,
                                uint8_t* __restrict codes) {
  alignas(64) float terms[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  const float exponent = exponent_of(amax), shrink = inverse_exponent(exponent);
  for (uint32_t i = 0; i < size; i++) {
    y[i] = y[i] * shrink;
    terms[i] = y[i] * y[i];
  }
  const float energy = add_halves(terms, size);
  const float inv = std::sqrt(static_cast<float>(size) / energy);
  code_values<kBits>(y, inv, size, codes, terms);
  const float along = add_halves(terms, size);
  if (!mmse) return energy / along * exponent;
  for (uint32_t i = 0; i < size; i++) {
    const float value = dequantize<kBits>(codes[i]);
    terms[i] = value * value;
  }
  return along / add_halves(terms, size) * exponent;
}

/// Decodes a rotation's codes, a byte each.
template <int kBits>
PYCOMM_INLINE void read_block(const uint8_t* codes, float scale, int size_bits,
                              float* __restrict y) {
  const uint32_t size = 1u << size_bits;
#ifdef PYCOMM_AVX2
  if (kBits > 2 && has_avx2()) return decode_avx2<kBits>(codes, scale, size, y);
#endif
  for (uint32_t i = 0; i < size; i++) y[i] = dequantize<kBits>(codes[i]) * scale;
}

/// Calls act(lo, n) for the parts of a rotation that are packed at once.
template <typename Act>
PYCOMM_INLINE void each_packed(size_t size, const Act& act) {
  for (size_t lo = 0; lo < size; lo += kMaxBlock) {
    act(lo, size - lo < kMaxBlock ? size - lo : kMaxBlock);
  }
}

template <int kBits>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) float y[kMaxRotation];
  alignas(64) uint8_t unpacked[kMaxRotation];
  BlockResiduals<kMaxRotation> residuals(args);
  const bool feedback = args.has_residual();
  const size_t size = size_t{1} << f.size_bits;
  const RotationHeader header{rotation_key(args.key.seed, args.key.step, args.key.tensor),
                              args.index / kSignsPerWord};
  std::memcpy(args.out.data, &header, kHeaderBytes);
  auto* scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
  uint8_t* codes = args.out.data + codes_offset(f, args.in.size);
  for (size_t lo = 0; lo < args.in.size; lo += size, codes += code_bytes(f)) {
    const size_t n = args.in.size - lo < size ? args.in.size - lo : size;
    prefetch_block(args, lo, size);
    const float* x = args.in.data + lo;
    const float* const residual = feedback ? residuals.load(lo, n) : nullptr;
    const RotationSigns signs(header, lo, size);
    rotate_block(signs, x, residual, n, f.size_bits, y);
    const float amax = max_magnitude(y, size);
    float scale = codecs::scale(amax, 1.0f);
    if (used(amax)) {
      scale = write_block<kBits>(y, f.size_bits, amax, f.mmse, unpacked);
    } else {
      std::memset(unpacked, 0, size);
    }
    each_packed(size, [&](size_t at, size_t count) {
      pack(kBits, unpacked + at, count, codes + at * kBits / 8);
    });
    *scales++ = scale;
    if (residual) {
      read_block<kBits>(unpacked, scale, f.size_bits, y);
      const Sink sink{Then::store_residual, residuals.fresh(lo), x, residual};
      unrotate_block(signs, y, n, f.size_bits, sink);
      residuals.store(lo, n);
    }
  }
  zero_padding(args.out, static_cast<size_t>(codes - args.out.data));
}

template <int kBits>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out,
                            Then then) {
  alignas(64) float y[kMaxRotation];
  alignas(64) uint8_t unpacked[kMaxRotation];
  const size_t size = size_t{1} << f.size_bits;
  RotationHeader header;
  std::memcpy(&header, payload.data, kHeaderBytes);
  const auto* scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
  const uint8_t* codes = payload.data + codes_offset(f, out.size);
  for (size_t lo = 0; lo < out.size; lo += size, codes += code_bytes(f)) {
    const size_t n = out.size - lo < size ? out.size - lo : size;
    each_packed(size, [&](size_t at, size_t count) {
      unpack(kBits, codes + at * kBits / 8, count, unpacked + at);
    });
    read_block<kBits>(unpacked, *scales++, f.size_bits, y);
    unrotate_block(RotationSigns(header, lo, size), y, n, f.size_bits, {then, out.data + lo});
  }
}

// ---------------------------------------------------- launches in CUDA (eden.cu)

/// Returns the bits of a size that has kernels of its own, else 0.
int known_size(const Format& format) {
  return format.size_bits == 7 || format.size_bits == 10 ? format.size_bits : 0;
}

class Eden final : public Codec {
 public:
  explicit Eden(const Format& format) : format_(format) {}

  std::string_view name() const override { return "eden"; }
  std::string spec() const override {
    return "eden:bits=" + std::to_string(format_.bits) +
           ",size=" + std::to_string(1 << format_.size_bits) +
           ",scale=" + (format_.mmse ? "mmse" : "unbiased");
  }
  int wire_version() const override { return kWireVersion; }
  bool takes_stored(Device) const override { return true; }
  size_t granule() const override { return size_t{1} << format_.size_bits; }
  size_t encoded_bytes(size_t numel) const override { return eden::encoded_bytes(format_, numel); }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    with_bits<4>(format_.bits, [&](auto bits) { encode_all<bits>(format_, args); });
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    const Then then = add ? Then::add : Then::store;
    with_bits<4>(format_.bits, [&](auto bits) { decode_all<bits>(format_, payload, out, then); });
  }
  void encode_cuda(const EncodeArgs& args) const override {
    EncodeParams params = encode_params(1, codes_offset(format_, args.in.size), args);
    params.header = reinterpret_cast<uint32_t*>(args.out.data);
    params.scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
    params.key = rotation_key(args.key.seed, args.key.step, args.key.tensor);
    params.rotation_bits = format_.size_bits;
    launch("eden",
           kernel_name("eden::encode_kernel", format_.bits, known_size(format_), format_.mmse),
           params, args.in.size, kTile, args.stream);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    DecodeParams params = decode_params(1, codes_offset(format_, out.size), payload, out);
    params.header = reinterpret_cast<const uint32_t*>(payload.data);
    params.scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
    params.rotation_bits = format_.size_bits;
    params.add = add;
    launch("eden", kernel_name("eden::decode_kernel", format_.bits, known_size(format_)), params,
           out.size, kTile, stream);
  }

  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.bits = options.integer("bits", 2);
  if (format.bits < 1 || format.bits > 4) {
    options.fail("bits=" + std::to_string(format.bits) + ": use 1, 2, 3 or 4");
  }
  const int size = options.integer("size", 1024);
  const bool power = size > 0 && (size & (size - 1)) == 0;
  if (!power || size < static_cast<int>(kMinRotation) || size > static_cast<int>(kMaxRotation)) {
    options.fail("size=" + std::to_string(size) + ": use a power of two from 32 to 4096");
  }
  format.size_bits = __builtin_ctz(static_cast<unsigned>(size));
  format.mmse = options.choice("scale", {"unbiased", "mmse"}, 0) == 1;
  options.finish();
  return std::make_unique<Eden>(format);
}

}  // namespace pycomm::codecs::eden

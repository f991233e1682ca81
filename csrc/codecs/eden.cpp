// eden on the CPU: plain loops over eden.h, compiled for several x86 levels.
#include "codecs/eden.h"

#include <cmath>
#include <limits>

#include "codecs/base/bits.h"
#include "codecs/base/block_launch.h"
#include "codecs/base/registry.h"
#include "codecs/rotation/loops.h"
#include "core/error.h"

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

/// Implements quantize() of many levels by a table, from which vectors gather: a cell of 1 / kCells
/// has one border at most, so a magnitude is beyond those below its cell and, perhaps, one more.
template <int kBits>
struct Search {
  static constexpr int kCells = 64;
  static constexpr int kLast = 5 * kCells - 1;  ///< beyond the last border

  constexpr Search() {
    const int count = num_levels(kBits) - 1;
    for (int i = 0; i <= count; i++) levels[i] = level(kBits, i);
    for (int i = 0; i < count; i++) borders[i] = border(kBits, i);
    borders[count] = std::numeric_limits<float>::infinity();
    int place = 0;
    for (int cell = 0; cell <= kLast; cell++) {
      while (borders[place] * kCells <= static_cast<float>(cell)) place++;
      first[cell] = place;
    }
  }

  int32_t first[kLast + 1] = {};
  float borders[num_levels(kBits)] = {};
  float levels[num_levels(kBits)] = {};
};
template <int kBits>
constexpr Search<kBits> kSearch;

template <int kBits>
PYCOMM_INLINE Coded quantize_fast(float u, float inv) {
  if constexpr (kBits < 5) {
    return quantize<kBits>(u, inv);
  } else {
    const Search<kBits>& search = kSearch<kBits>;
    const float magnitude = bits_float(magnitude_bits(u * inv));
    const float scaled = magnitude * Search<kBits>::kCells;  // exact, and at most 64 * 64
    const auto cell = static_cast<int32_t>(scaled);
    int32_t place = search.first[cell < Search<kBits>::kLast ? cell : Search<kBits>::kLast];
    place += magnitude >= search.borders[place] ? 1 : 0;
    const uint32_t sign = float_bits(u) >> 31;
    return {static_cast<uint32_t>(place) | sign << (kBits - 1),
            bits_float(float_bits(search.levels[place]) | sign << 31)};
  }
}

/// Writes the codes of a used rotation; returns its scale. kBits whole bits, and possibly half a
/// bit.
template <int kBits, bool kHalf>
PYCOMM_INLINE float write_block(const Signs& choice, float* __restrict y, int size_bits, float amax,
                                bool mmse, uint8_t* out) {
  alignas(64) float terms[kMaxRotation];
  alignas(64) float squares[kMaxRotation];
  alignas(64) uint8_t codes[kMaxRotation];
  const uint32_t size = 1u << size_bits;
  const float exponent = exponent_of(amax), shrink = inverse_exponent(exponent);
  for (uint32_t i = 0; i < size; i++) {
    y[i] = y[i] * shrink;
    terms[i] = y[i] * y[i];
  }
  const float energy = add_halves(terms, size);
  const float inv = std::sqrt(static_cast<float>(size) / energy);
  if constexpr (kHalf) {
    const float* __restrict far = y + size / 2;
    for (uint32_t lo = 0; lo < size / 2; lo += 16) {
      const uint32_t word = choice[lo / kSignsPerWord] >> lo % kSignsPerWord;
      for (uint32_t i = 0; i < 16; i++) {
        const bool second = word >> i & 1;
        const float a = y[lo + i], b = far[lo + i];
        const float wide = second ? b : a, narrow = second ? a : b;
        const Coded w = quantize<kBits + 1>(wide, inv), n = quantize<kBits>(narrow, inv);
        codes[lo + i] = static_cast<uint8_t>(n.code | w.code << kBits);
        terms[lo + i] = w.value * wide + n.value * narrow;
        squares[lo + i] = w.value * w.value + n.value * n.value;
      }
    }
  } else {
    for (uint32_t i = 0; i < size; i++) {
      const Coded coded = quantize_fast<kBits>(y[i], inv);
      codes[i] = static_cast<uint8_t>(coded.code);
      terms[i] = coded.value * y[i];
      squares[i] = coded.value * coded.value;
    }
  }
  constexpr uint32_t kUnitBits = kHalf ? 2 * kBits + 1 : kBits;
  const uint32_t units = kHalf ? size / 2 : size;
  for (uint32_t lo = 0; lo < units; lo += kMaxBlock) {
    const uint32_t n = units - lo < kMaxBlock ? units - lo : kMaxBlock;
    pack(kUnitBits, codes + lo, n, out + lo * kUnitBits / 8);
  }
  const float along = add_halves(terms, units);
  return (mmse ? along / add_halves(squares, units) : energy / along) * exponent;
}

/// Implements dequantize() by the code: vectors gather from a table.
template <int kBits>
struct Table {
  constexpr Table() {
    for (uint32_t code = 0; code <= kMask; code++) {
      const float value = level(kBits, static_cast<int>(code & (kMask >> 1)));
      values[code] = code > kMask >> 1 ? -value : value;
    }
  }
  PYCOMM_INLINE float operator[](uint32_t code) const { return values[code & kMask]; }

  static constexpr uint32_t kMask = (1u << kBits) - 1;
  alignas(64) float values[kMask + 1] = {};
};
template <int kBits>
constexpr Table<kBits> kTable;

template <int kBits, bool kHalf>
PYCOMM_INLINE void read_block(const Signs& choice, const uint8_t* in, float scale, int size_bits,
                              float* __restrict y) {
  alignas(64) uint8_t codes[kMaxRotation];
  constexpr uint32_t kUnitBits = kHalf ? 2 * kBits + 1 : kBits;
  const uint32_t size = 1u << size_bits;
  const uint32_t units = kHalf ? size / 2 : size;
  const Table<kBits>& narrows = kTable<kBits>;
  constexpr int kWide = kHalf ? kBits + 1 : 0;
  const Table<kWide>& wides = kTable<kWide>;
  for (uint32_t lo = 0; lo < units; lo += kMaxBlock) {
    const uint32_t n = units - lo < kMaxBlock ? units - lo : kMaxBlock;
    unpack(kUnitBits, in + lo * kUnitBits / 8, n, codes + lo);
  }
  if constexpr (kHalf) {
    float* __restrict far = y + size / 2;
    for (uint32_t lo = 0; lo < size / 2; lo += 16) {
      const uint32_t word = choice[lo / kSignsPerWord] >> lo % kSignsPerWord;
      for (uint32_t i = 0; i < 16; i++) {
        const bool second = word >> i & 1;
        const float wide = wides[codes[lo + i] >> kBits] * scale;
        const float narrow = narrows[codes[lo + i]] * scale;
        y[lo + i] = second ? narrow : wide;
        far[lo + i] = second ? wide : narrow;
      }
    }
  } else {
    for (uint32_t i = 0; i < size; i++) {
      // With two levels the choice is faster than the table.
      const float value = kBits <= 2 ? dequantize<kBits>(codes[i]) : narrows[codes[i]];
      y[i] = value * scale;
    }
  }
}

template <int kBits, bool kHalf>
PYCOMM_SIMD void encode_all(const Format& f, const EncodeArgs& args) {
  alignas(64) float y[kMaxRotation];
  const size_t size = size_t{1} << f.size_bits;
  const RotationHeader header{rotation_key(args.key.seed, args.key.step, args.key.tensor),
                              args.index / kSignsPerWord};
  std::memcpy(args.out.data, &header, kHeaderBytes);
  auto* scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
  uint8_t* codes = args.out.data + codes_offset(f, args.in.size);
  for (size_t lo = 0; lo < args.in.size; lo += size, codes += code_bytes(f)) {
    const size_t n = args.in.size - lo < size ? args.in.size - lo : size;
    const float* x = args.in.data + lo;
    const float* residual = args.residual ? args.residual + lo : nullptr;
    const RotationSigns signs(header, lo, size);
    rotate_block(signs, x, residual, n, f.size_bits, y);
    const float amax = max_magnitude(y, size);
    float scale = codecs::scale(amax, 1.0f);
    if (used(amax)) {
      const Signs choice(header, lo, kHalf ? size : 0, kChoiceTensor);
      scale = write_block<kBits, kHalf>(choice, y, f.size_bits, amax, f.mmse, codes);
    } else {
      std::memset(codes, 0, code_bytes(f));
    }
    *scales++ = scale;
    if (residual) {
      const Signs choice(header, lo, kHalf ? size : 0, kChoiceTensor);
      read_block<kBits, kHalf>(choice, codes, scale, f.size_bits, y);
      const Sink sink{Then::store_residual, args.new_residual + lo, x, residual};
      unrotate_block(signs, y, n, f.size_bits, sink);
    }
  }
  zero_padding(args.out, static_cast<size_t>(codes - args.out.data));
}

template <int kBits, bool kHalf>
PYCOMM_SIMD void decode_all(const Format& f, Span<const uint8_t> payload, Span<float> out,
                            Then then) {
  alignas(64) float y[kMaxRotation];
  const size_t size = size_t{1} << f.size_bits;
  RotationHeader header;
  std::memcpy(&header, payload.data, kHeaderBytes);
  const auto* scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
  const uint8_t* codes = payload.data + codes_offset(f, out.size);
  for (size_t lo = 0; lo < out.size; lo += size, codes += code_bytes(f)) {
    const size_t n = out.size - lo < size ? out.size - lo : size;
    const Signs choice(header, lo, kHalf ? size : 0, kChoiceTensor);
    read_block<kBits, kHalf>(choice, codes, *scales++, f.size_bits, y);
    unrotate_block(RotationSigns(header, lo, size), y, n, f.size_bits, {then, out.data + lo});
  }
}

// ---------------------------------------------------- launches in CUDA (eden.cu)

/// Returns a kernel, which is compiled for the whole bits, and with a half bit or not.
std::string kernel_of(const char* name, const Format& format) {
  return kernel_name(name, format.half_bits / 2, format.half_bits % 2 != 0);
}

void encode_cuda(const Format& format, const EncodeArgs& args) {
  EncodeParams params = encode_params(1, codes_offset(format, args.in.size), args);
  params.header = reinterpret_cast<uint32_t*>(args.out.data);
  params.scales = reinterpret_cast<float*>(args.out.data + kHeaderBytes);
  params.key = rotation_key(args.key.seed, args.key.step, args.key.tensor);
  params.rotation_bits = format.size_bits;
  params.options = format.mmse ? kMmse : 0;
  launch("eden", kernel_of("eden::encode_kernel", format), params, args.in.size, kTile,
         args.stream);
}

void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 const Stream& stream) {
  DecodeParams params = decode_params(1, codes_offset(format, out.size), payload, out);
  params.header = reinterpret_cast<const uint32_t*>(payload.data);
  params.scales = reinterpret_cast<const float*>(payload.data + kHeaderBytes);
  params.rotation_bits = format.size_bits;
  params.add = add;
  launch("eden", kernel_of("eden::decode_kernel", format), params, out.size, kTile, stream);
}

class Eden final : public Codec {
 public:
  explicit Eden(const Format& format) : format_(format) {}

  std::string_view name() const override { return "eden"; }
  std::string spec() const override {
    return "eden:bits=" + std::to_string(format_.half_bits / 2) +
           (format_.half_bits % 2 ? ".5" : "") + ",size=" + std::to_string(1 << format_.size_bits) +
           ",scale=" + (format_.mmse ? "mmse" : "unbiased");
  }
  Combine combine() const override { return Combine::recode; }
  int wire_version() const override { return kWireVersion; }
  bool fuses_residual() const override { return true; }
  size_t granule() const override { return size_t{1} << format_.size_bits; }
  size_t encoded_bytes(size_t numel) const override { return eden::encoded_bytes(format_, numel); }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    if (args.in.size == 0) return;
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    with_bits(format_, [&](auto bits, auto half) { encode_all<bits, half>(format_, args); });
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_then(Then::store, payload, out, stream);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_then(Then::add, payload, out, stream);
  }

 private:
  void decode_then(Then then, Span<const uint8_t> payload, Span<float> out, Stream stream) const {
    check_decode(*this, payload, out);
    if (out.size == 0) return;
    if (stream.device == Device::cuda) {
      return decode_cuda(format_, payload, out, then == Then::add, stream);
    }
    with_bits(format_,
              [&](auto bits, auto half) { decode_all<bits, half>(format_, payload, out, then); });
  }

  Format format_;
};

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  const double bits = options.number("bits", 2);
  // Rejects everything outside this range, also NaN.
  if (!(bits >= 0.5 && bits <= 8) || std::floor(2 * bits) != 2 * bits ||
      (bits > 4 && std::floor(bits) != bits)) {
    options.fail("bits=" + number_text(bits) + ": use 0.5, 1, 1.5, ... 4, 5, 6, 7 or 8");
  }
  format.half_bits = static_cast<int>(2 * bits);
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

// eden: a random rotation makes values normal, and each travels as the nearest of the levels that
// are optimal for the normal distribution. Wire format: docs/wire/eden.md. Everything that
// determines the bits is here and in rotation.h, compiled by gcc, nvcc and NVRTC.
#pragma once
#ifndef __CUDACC_RTC__
#include <type_traits>
#endif

#include "codecs/base/block.h"
#include "codecs/rotation/rotation.h"
#include "core/types.h"

namespace pycomm::codecs::eden {

constexpr int kWireVersion = 2;

/// Format of eden. `half_bits` is odd where a value has a half bit: then one of two values, chosen
/// at random, takes a bit more than the other.
struct Format {
  int half_bits = 4;  ///< 1 (half a bit), 2, ... 8 (4 bits), 10, 12, 14, 16
  int size_bits = 10;
  bool mmse = false;  ///< the scale with the least error; else the unbiased one
};

/// Tensor number for the words of this choice; the words of signs use tensor 0 and step 0.
constexpr uint32_t kChoiceTensor = 1;

PYCOMM_HD size_t num_rotations(const Format& f, size_t numel) {
  return (numel + (size_t{1} << f.size_bits) - 1) >> f.size_bits;
}
PYCOMM_HD size_t scale_bytes(const Format& f, size_t numel) { return num_rotations(f, numel) * 4; }
/// The payload is the header, the scales, then the codes of whole rotations.
PYCOMM_HD size_t codes_offset(const Format& f, size_t numel) {
  return numel == 0 ? 0 : sizeof(RotationHeader) + scale_bytes(f, numel);
}
/// Bytes of the codes of one rotation; even, since a rotation has 32 values or more.
PYCOMM_HD size_t code_bytes(const Format& f) {
  return (static_cast<size_t>(f.half_bits) << f.size_bits) / 16;
}
PYCOMM_HD size_t encoded_bytes(const Format& f, size_t numel) {
  return codes_offset(f, numel) + padded(num_rotations(f, numel) * code_bytes(f));
}

// The levels of 5 to 8 bits: too many for registers, so kernels read them from memory.
// clang-format off
#define PYCOMM_EDEN_FINE \
  {0.06588966f, 0.19805183f, 0.3313783f, 0.4666995f, 0.6049336f, 0.7471357f, 0.8945651f, \
   1.0487833f, 1.2118044f, 1.3863404f, 1.576228f, 1.7872332f, 2.0287285f, 2.3177395f, \
   2.6911197f, 3.2607324f}, \
  {0.033409506f, 0.10027829f, 0.1672969f, 0.23456699f, 0.30219284f, 0.37028265f, \
   0.43894967f, 0.5083138f, 0.578503f, 0.6496556f, 0.7219219f, 0.7954677f, 0.8704766f, \
   0.94715494f, 1.0257363f, 1.1064882f, 1.1897202f, 1.2757945f, 1.365141f, 1.4582764f, \
   1.5558312f, 1.6585889f, 1.7675419f, 1.8839773f, 2.0096111f, 2.1468103f, 2.2989812f, \
   2.471305f, 2.6722739f, 2.9174068f, 3.240437f, 3.7441013f}, \
  {0.01682817f, 0.050490864f, 0.08417264f, 0.11788628f, 0.15164465f, 0.18546072f, \
   0.21934764f, 0.25331873f, 0.28738755f, 0.32156795f, 0.35587403f, 0.3903203f, \
   0.42492166f, 0.45969343f, 0.49465147f, 0.5298122f, 0.56519264f, 0.6008105f, 0.6366843f, \
   0.6728333f, 0.70927787f, 0.74603915f, 0.78313965f, 0.82060295f, 0.8584542f, 0.89671993f, \
   0.9354285f, 0.97461f, 1.0142967f, 1.0545232f, 1.0953267f, 1.1367474f, 1.1788286f, \
   1.2216175f, 1.2651651f, 1.3095276f, 1.3547662f, 1.4009485f, 1.448149f, 1.49645f, \
   1.5459437f, 1.5967331f, 1.6489339f, 1.702677f, 1.7581115f, 1.8154078f, 1.8747625f, \
   1.9364046f, 2.0006018f, 2.0676715f, 2.1379933f, 2.2120275f, 2.2903392f, 2.3736343f, \
   2.4628115f, 2.5590405f, 2.6638865f, 2.7795143f, 2.9090471f, 3.0572462f, 3.231933f, \
   3.4474304f, 3.7349367f, 4.189694f}, \
  {0.008446193f, 0.025339384f, 0.042234983f, 0.059134603f, 0.07603986f, 0.092952356f, \
   0.10987372f, 0.12680559f, 0.14374956f, 0.16070732f, 0.17768049f, 0.19467075f, \
   0.21167976f, 0.2287092f, 0.24576078f, 0.26283622f, 0.27993724f, 0.2970656f, 0.31422305f, \
   0.3314114f, 0.34863243f, 0.365888f, 0.38317996f, 0.40051022f, 0.41788065f, 0.4352932f, \
   0.45274988f, 0.47025266f, 0.4878036f, 0.5054048f, 0.5230583f, 0.5407663f, 0.55853105f, \
   0.5763547f, 0.5942396f, 0.6121881f, 0.6302026f, 0.6482855f, 0.6664394f, 0.68466675f, \
   0.70297027f, 0.72135264f, 0.7398166f, 0.75836504f, 0.77700084f, 0.795727f, 0.8145467f, \
   0.833463f, 0.8524793f, 0.8715989f, 0.8908253f, 0.91016203f, 0.92961293f, 0.9491818f, \
   0.9688726f, 0.98868936f, 1.0086365f, 1.0287182f, 1.0489392f, 1.0693042f, 1.0898181f, \
   1.110486f, 1.1313132f, 1.1523054f, 1.1734682f, 1.1948076f, 1.2163299f, 1.2380418f, \
   1.2599499f, 1.2820615f, 1.304384f, 1.3269253f, 1.3496937f, 1.3726976f, 1.3959464f, \
   1.4194493f, 1.4432166f, 1.4672587f, 1.491587f, 1.5162132f, 1.5411496f, 1.5664098f, \
   1.5920075f, 1.6179578f, 1.6442765f, 1.6709803f, 1.6980875f, 1.7256169f, 1.7535894f, \
   1.7820269f, 1.8109531f, 1.8403933f, 1.8703752f, 1.900928f, 1.9320842f, 1.9638784f, \
   1.9963485f, 2.0295358f, 2.0634851f, 2.0982466f, 2.1338742f, 2.1704283f, 2.2079754f, \
   2.24659f, 2.2863545f, 2.3273618f, 2.3697171f, 2.4135387f, 2.4589622f, 2.5061426f, \
   2.5552595f, 2.6065214f, 2.660174f, 2.7165077f, 2.7758706f, 2.8386858f, 2.905473f, \
   2.9768822f, 3.053742f, 3.1371326f, 3.2285001f, 3.3298485f, 3.4440718f, 3.575588f, \
   3.7316663f, 3.9256377f, 4.1865954f, 4.6035357f}
// clang-format on
constexpr float kFineLevels[4][128] = {PYCOMM_EDEN_FINE};
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
static __device__ const float kFineLevelsOnDevice[4][128] = {PYCOMM_EDEN_FINE};
#endif
#undef PYCOMM_EDEN_FINE

/// Magnitudes of the Lloyd-Max levels of N(0, 1) for 0 to 8 bits, ascending.
PYCOMM_HD constexpr float level(int bits, int place) {
  constexpr float kLevels[5][8] = {{0.0f},
                                   {0.7978846f},
                                   {0.45278f, 1.5104176f},
                                   {0.2450942f, 0.7560053f, 1.3439093f, 2.1519457f},
                                   {0.128395f, 0.3880483f, 0.6567591f, 0.9423405f, 1.2562312f,
                                    1.6180464f, 2.0690172f, 2.7325896f}};
#ifndef __CUDA_ARCH__  // where fine_level() has them
  if (bits > 4) return kFineLevels[bits - 5][place];
#endif
  return kLevels[bits][place];
}
/// The same for 5 to 8 bits and a place that is known at run time.
PYCOMM_HD float fine_level(int bits, uint32_t place) {
#ifdef __CUDA_ARCH__
  return kFineLevelsOnDevice[bits - 5][place];
#else
  return kFineLevels[bits - 5][place];
#endif
}
/// From it on a magnitude is nearer to level `place` + 1.
PYCOMM_HD constexpr float border(int bits, int place) {
  if (bits > 4) return (level(bits, place) + level(bits, place + 1)) * 0.5f;
  constexpr float kBorders[5][8] = {
      {},
      {},
      {0.9815988f},
      {0.5005497f, 1.0499573f, 1.7479275f},
      {0.2582217f, 0.5224037f, 0.7995498f, 1.0992858f, 1.4371388f, 1.8435318f, 2.4008034f},
  };
  return kBorders[bits][place];
}
PYCOMM_HD constexpr int num_levels(int bits) { return bits == 0 ? 1 : 1 << (bits - 1); }

/// A code is the place of its level and, on top, the sign.
struct Coded {
  uint32_t code;
  float value;
};

template <int kBits>
PYCOMM_HD Coded quantize(float u, float inv) {
  if constexpr (kBits == 0) {
    return {0, 0.0f};
  } else {
    const float magnitude = bits_float(magnitude_bits(u * inv));
    uint32_t code = 0;
    float value;
    if constexpr (kBits < 5) {
      value = level(kBits, 0);
      for (int i = 0; i < num_levels(kBits) - 1; i++) {
        const bool beyond = magnitude >= border(kBits, i);
        code += beyond ? 1 : 0;
        value = beyond ? level(kBits, i + 1) : value;
      }
    } else {
      for (uint32_t step = num_levels(kBits) / 2; step > 0; step /= 2) {
        const uint32_t last = code + step - 1;
        const float border = (fine_level(kBits, last) + fine_level(kBits, last + 1)) * 0.5f;
        code += magnitude >= border ? step : 0;
      }
      value = fine_level(kBits, code);
    }
    const uint32_t sign = float_bits(u) >> 31;
    return {code | sign << (kBits - 1), bits_float(float_bits(value) | sign << 31)};
  }
}

/// Decodes the lowest kBits bits of `code`; the others may be anything.
template <int kBits>
PYCOMM_HD float dequantize(uint32_t code) {
  if constexpr (kBits == 0) {
    return 0.0f;
  } else {
    const uint32_t place = code & ((1u << (kBits - 1)) - 1);
    float value;
    if constexpr (kBits < 5) {
      value = level(kBits, 0);
      for (int i = 0; i < num_levels(kBits) - 1; i++) {
        value = place > static_cast<uint32_t>(i) ? level(kBits, i + 1) : value;
      }
    } else {
      value = fine_level(kBits, place);
    }
    return bits_float(float_bits(value) | (code >> (kBits - 1) & 1) << 31);
  }
}

/// Power of two by which a rotation is scaled until its largest magnitude is in [1, 2): its squares
/// are far from the ends of float32.
PYCOMM_HD float exponent_of(float amax) { return bits_float(float_bits(amax) & kInfBits); }
PYCOMM_HD float inverse_exponent(float exponent) {
  return bits_float((254u << 23) - float_bits(exponent));
}

/// Bits of EncodeParams::options.
constexpr uint32_t kMmse = 1;

#ifndef __CUDACC_RTC__
/// Calls f with the whole bits of a format and with a half bit or not, as types.
template <typename F>
void with_bits(const Format& format, F&& f) {
  using std::integral_constant;
  const auto with_half = [&](auto bits) {
    if (format.half_bits % 2) {
      if constexpr (bits < 4) f(bits, std::true_type{});
    } else {
      if constexpr (bits > 0) f(bits, std::false_type{});
    }
  };
  switch (format.half_bits / 2) {
    case 0:
      return with_half(integral_constant<int, 0>{});
    case 1:
      return with_half(integral_constant<int, 1>{});
    case 2:
      return with_half(integral_constant<int, 2>{});
    case 3:
      return with_half(integral_constant<int, 3>{});
    case 4:
      return with_half(integral_constant<int, 4>{});
    case 5:
      return with_half(integral_constant<int, 5>{});
    case 6:
      return with_half(integral_constant<int, 6>{});
    case 7:
      return with_half(integral_constant<int, 7>{});
    case 8:
      return with_half(integral_constant<int, 8>{});
  }
}
#endif

}  // namespace pycomm::codecs::eden

// CRC-32C by carry-less multiplication of AVX-512 vectors, by three interleaved streams of the
// crc32 instruction (x86 and Arm), or by a table of eight bytes per step.
//
// Folding follows V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009. All polynomials here are bit-reflected, as CRC-32C is.
#include "core/crc32c.h"

#include <array>
#include <cstring>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PYCOMM_CRC __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
// gcc and clang call the extension and its instructions differently.
#if defined(__clang__)
#define PYCOMM_CRC __attribute__((target("crc")))
#define PYCOMM_CRC_WORD __builtin_arm_crc32cd
#define PYCOMM_CRC_BYTE __builtin_arm_crc32cb
#else
#define PYCOMM_CRC __attribute__((target("+crc")))
#define PYCOMM_CRC_WORD __builtin_aarch64_crc32cx
#define PYCOMM_CRC_BYTE __builtin_aarch64_crc32cb
#endif
#endif

namespace pycomm {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected 0x1edc6f41

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b does to the checksum after k more zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; k++) {
    for (size_t b = 0; b < 256; b++) {
      const uint32_t crc = tables[k - 1][b];
      tables[k][b] = crc >> 8 ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint32_t update_by_table(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; k++) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; n > 0; p++, n--) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(PYCOMM_CRC)

#if defined(__x86_64__)
PYCOMM_CRC inline uint32_t step(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
PYCOMM_CRC inline uint32_t step(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }

bool has_crc_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
PYCOMM_CRC inline uint32_t step(uint32_t crc, uint64_t word) { return PYCOMM_CRC_WORD(crc, word); }
PYCOMM_CRC inline uint32_t step(uint32_t crc, uint8_t byte) { return PYCOMM_CRC_BYTE(crc, byte); }

bool has_crc_instruction() {
  constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32 of the kernel's interface
  return (getauxval(AT_HWCAP) & kCrc32) != 0;
}
#endif

PYCOMM_CRC uint32_t update_in_order(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    crc = step(crc, word);
  }
  for (; n > 0; p++, n--) crc = step(crc, *p);
  return crc;
}

// Returns x^n modulo the polynomial. The highest bit is x^0.
constexpr uint32_t power_of_x(uint64_t n) {
  uint32_t power = 0x80000000;
  for (; n > 0; n--) power = power & 1 ? power >> 1 ^ kPolynomial : power >> 1;
  return power;
}

// Returns a times b modulo the polynomial.
constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (; a != 0; a <<= 1) {
    if (a & 0x80000000) sum ^= b;
    b = b & 1 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return sum;
}

// Tables of how each byte of a checksum changes by `kBytes` more zero bytes.
template <uint64_t kBytes>
constexpr std::array<std::array<uint32_t, 256>, 4> make_shifts() {
  constexpr uint32_t kFactor = power_of_x(8 * kBytes);
  std::array<std::array<uint32_t, 256>, 4> shifts{};
  for (uint32_t k = 0; k < 4; k++) {
    for (uint32_t b = 0; b < 256; b++) shifts[k][b] = product(b << (8 * k), kFactor);
  }
  return shifts;
}

template <uint64_t kBytes>
uint32_t after_zeros(uint32_t crc) {
  static constexpr auto kShifts = make_shifts<kBytes>();
  return kShifts[0][crc & 0xff] ^ kShifts[1][crc >> 8 & 0xff] ^ kShifts[2][crc >> 16 & 0xff] ^
         kShifts[3][crc >> 24];
}

// Data in memory are fetched over several pages and into the second-level cache, since the
// processor by itself stops at the end of each page.
constexpr size_t kAhead = 16 << 10;

// An instruction takes two or three cycles and starts every cycle: three independent streams keep
// it busy.
PYCOMM_CRC uint32_t update_by_streams(uint32_t crc, const uint8_t* p, size_t n) {
  constexpr size_t kStream = 1024, kLine = 64;
  for (; n >= 3 * kStream; p += 3 * kStream, n -= 3 * kStream) {
    uint32_t a = crc, b = 0, c = 0;
    for (size_t line = 0; line < kStream; line += kLine) {
      for (size_t s = 0; s < 3; s++) __builtin_prefetch(p + s * kStream + line + kAhead, 0, 2);
      for (size_t i = line; i < line + kLine; i += 8) {
        uint64_t words[3];
        for (size_t s = 0; s < 3; s++) std::memcpy(&words[s], p + s * kStream + i, 8);
        a = step(a, words[0]);
        b = step(b, words[1]);
        c = step(c, words[2]);
      }
    }
    crc = after_zeros<2 * kStream>(a) ^ after_zeros<kStream>(b) ^ c;
  }
  return update_in_order(crc, p, n);
}

#if defined(__x86_64__)
#define PYCOMM_FOLD __attribute__((target("avx512f,vpclmulqdq,sse4.2")))

// Factors that advance 128 bits by `kBits`: for the low half, which stands for the higher powers,
// and for the high half. They are shifted by one, since the product of two reflected words is one
// bit short.
template <uint64_t kBits>
PYCOMM_FOLD inline __m512i factors() {
  constexpr auto kLow = static_cast<int64_t>(uint64_t{power_of_x(kBits + 32)} << 1);
  constexpr auto kHigh = static_cast<int64_t>(uint64_t{power_of_x(kBits - 32)} << 1);
  return _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
}

PYCOMM_FOLD inline __m512i fold(__m512i sum, __m512i by, __m512i next) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00),
                                   _mm512_clmulepi64_epi128(sum, by, 0x11), next, kXor3);
}

// 256 bytes per step. Fetches ahead as update_by_streams does.
PYCOMM_FOLD uint32_t update_by_folding(uint32_t crc, const uint8_t* p, size_t n) {
  constexpr size_t kVectors = 4, kStep = kVectors * 64;
  if (n < 2 * kStep) return update_in_order(crc, p, n);
  __m512i sums[kVectors];
  for (size_t v = 0; v < kVectors; v++) sums[v] = _mm512_loadu_si512(p + 64 * v);
  const __m128i before = _mm_cvtsi32_si128(static_cast<int>(crc));
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(before));
  p += kStep;
  n -= kStep;
  for (const __m512i by = factors<8 * kStep>(); n >= kStep; p += kStep, n -= kStep) {
    for (size_t v = 0; v < kVectors; v++) {
      __builtin_prefetch(p + kAhead + 64 * v, 0, 2);
      sums[v] = fold(sums[v], by, _mm512_loadu_si512(p + 64 * v));
    }
  }
  const __m512i by = factors<512>();
  __m512i sum = sums[0];
  for (size_t v = 1; v < kVectors; v++) sum = fold(sum, by, sums[v]);
  uint8_t rest[64];  // congruent to everything so far
  _mm512_storeu_si512(rest, sum);
  return update_in_order(update_in_order(0, rest, sizeof rest), p, n);
}

bool has_folding() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}
#endif

#endif

using Update = uint32_t (*)(uint32_t crc, const uint8_t* p, size_t n);

struct Way {
  const char* name;
  Update update;
};

// Returns the implementations that this processor has, fastest first.
std::vector<Way> ways() {
  std::vector<Way> ways = {{"table", update_by_table}};
#if defined(PYCOMM_CRC)
  if (!has_crc_instruction()) return ways;
  ways.insert(ways.begin(), {{"streams", update_by_streams}, {"instruction", update_in_order}});
#endif
#if defined(__x86_64__)
  if (has_folding()) ways.insert(ways.begin(), {"folding", update_by_folding});
#endif
  return ways;
}

}  // namespace

uint32_t crc32c(Span<const uint8_t> data, uint32_t before) {
  static const Update update = ways().front().update;
  return ~update(~before, data.data, data.size);
}

std::vector<std::string> crc32c_ways() {
  std::vector<std::string> names;
  for (const Way& way : ways()) names.emplace_back(way.name);
  return names;
}

uint32_t crc32c_by(const std::string& name, Span<const uint8_t> data, uint32_t before) {
  for (const Way& way : ways()) {
    if (way.name == name) return ~way.update(~before, data.data, data.size);
  }
  throw Error("this processor has no CRC-32C by \"" + name + "\"");
}

}  // namespace pycomm

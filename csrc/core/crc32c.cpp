// CRC-32C by the processor's instruction where it has one, else by a table of eight bytes per step.
#include "core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace pycomm {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b does to the checksum after k more zero bytes.
constexpr Tables make_tables() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected 0x1edc6f41
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

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t update_by_instruction(uint32_t crc, const uint8_t* p,
                                                                 size_t n) {
  uint64_t wide = crc;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; n > 0; p++, n--) crc = _mm_crc32_u8(crc, *p);
  return crc;
}
#endif

uint32_t update(uint32_t crc, const uint8_t* p, size_t n) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return update_by_instruction(crc, p, n);
#endif
  return update_by_table(crc, p, n);
}

}  // namespace

uint32_t crc32c(Span<const uint8_t> data, uint32_t before) {
  return ~update(~before, data.data, data.size);
}

uint32_t crc32c_by_table(Span<const uint8_t> data, uint32_t before) {
  return ~update_by_table(~before, data.data, data.size);
}

}  // namespace pycomm

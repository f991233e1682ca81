// scrypt (RFC 7914): PBKDF2 around a walk through a table that must be in memory as a whole.
#include "core/scrypt.h"

#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"

namespace pycomm {
namespace {

constexpr size_t kRows = 16384;              // N
constexpr size_t kHalf = 8;                  // r
constexpr size_t kWords = 16;                // of Salsa20
constexpr size_t kRow = 2 * kHalf * kWords;  // words of a row
static_assert((kRows & (kRows - 1)) == 0, "a row is picked by the low bits of a word");

uint32_t rotated(uint32_t x, int n) { return x << n | x >> (32 - n); }

void quarter(uint32_t* x, int a, int b, int c, int d) {
  x[b] ^= rotated(x[a] + x[d], 7);
  x[c] ^= rotated(x[b] + x[a], 9);
  x[d] ^= rotated(x[c] + x[b], 13);
  x[a] ^= rotated(x[d] + x[c], 18);
}

void salsa20_8(uint32_t* block) {
  uint32_t x[kWords];
  std::memcpy(x, block, sizeof x);
  for (int i = 0; i < 4; i++) {
    quarter(x, 0, 4, 8, 12);
    quarter(x, 5, 9, 13, 1);
    quarter(x, 10, 14, 2, 6);
    quarter(x, 15, 3, 7, 11);
    quarter(x, 0, 1, 2, 3);
    quarter(x, 5, 6, 7, 4);
    quarter(x, 10, 11, 8, 9);
    quarter(x, 15, 12, 13, 14);
  }
  for (size_t i = 0; i < kWords; i++) block[i] += x[i];
}

// Mixes `row` in place; `scratch` has its size.
void mix(uint32_t* row, uint32_t* scratch) {
  uint32_t x[kWords];
  std::memcpy(x, row + kRow - kWords, sizeof x);
  for (size_t i = 0; i < 2 * kHalf; i++) {
    for (size_t k = 0; k < kWords; k++) x[k] ^= row[i * kWords + k];
    salsa20_8(x);
    // Blocks with even numbers go to the first half.
    std::memcpy(scratch + (i / 2 + (i % 2) * kHalf) * kWords, x, sizeof x);
  }
  std::memcpy(row, scratch, kRow * sizeof *row);
}

// PBKDF2 (RFC 8018) with HMAC-SHA256 and one iteration; `bytes` is a multiple of 32.
std::string derived(std::string_view secret, const std::string& salt, size_t bytes) {
  std::string result;
  for (uint8_t i = 1; result.size() < bytes; i++) {
    const Digest part = hmac_sha256(secret, salt + std::string{0, 0, 0, static_cast<char>(i)});
    result.append(reinterpret_cast<const char*>(part.data()), part.size());
  }
  return result;
}

}  // namespace

Digest scrypt(std::string_view secret, std::string_view salt) {
  const std::string start = derived(secret, std::string(salt), kRow * sizeof(uint32_t));
  // Words are little-endian, as on all processors that pycomm runs on.
  std::vector<uint32_t> row(kRow), scratch(kRow), table(kRows * kRow);
  std::memcpy(row.data(), start.data(), start.size());
  for (size_t i = 0; i < kRows; i++) {
    std::memcpy(table.data() + i * kRow, row.data(), kRow * sizeof(uint32_t));
    mix(row.data(), scratch.data());
  }
  for (size_t i = 0; i < kRows; i++) {
    const size_t picked = row[kRow - kWords] & (kRows - 1);
    for (size_t k = 0; k < kRow; k++) row[k] ^= table[picked * kRow + k];
    mix(row.data(), scratch.data());
  }
  const std::string mixed(reinterpret_cast<const char*>(row.data()), kRow * sizeof(uint32_t));
  const std::string key = derived(secret, mixed, sizeof(Digest));
  Digest digest;
  std::memcpy(digest.data(), key.data(), digest.size());
  return digest;
}

}  // namespace pycomm

// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of TCP connections. They are
// implemented here so that the core needs no cryptographic library for one challenge per
// connection.
#pragma once
#include <algorithm>
#include <array>
#include <string_view>

#include "core/types.h"

namespace pycomm {

using Digest = std::array<uint8_t, 32>;

PYCOMM_API Digest sha256(std::string_view message);
PYCOMM_API Digest hmac_sha256(std::string_view key, std::string_view message);
/// Compares digests or texts in a time that does not depend on where they differ.
template <typename Bytes>
bool equal_proofs(const Bytes& a, const Bytes& b) {
  uint8_t difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); i++) {
    difference |= static_cast<uint8_t>(a[i] ^ b[i]);
  }
  return difference == 0;
}

}  // namespace pycomm

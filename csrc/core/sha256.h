// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of TCP connections. They are
// implemented here so that the core needs no cryptographic library for one challenge per
// connection.
#pragma once
#include <array>
#include <string_view>

#include "core/types.h"

namespace pycomm {

using Digest = std::array<uint8_t, 32>;

PYCOMM_API Digest sha256(std::string_view message);
PYCOMM_API Digest hmac_sha256(std::string_view key, std::string_view message);
/// Compares in time that does not depend on where the digests differ.
PYCOMM_API bool equal_digests(const Digest& a, const Digest& b);

}  // namespace pycomm

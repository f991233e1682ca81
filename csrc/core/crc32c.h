// CRC-32C (Castagnoli), the checksum of TCP frames.
#pragma once
#include <string>
#include <vector>

#include "core/types.h"

namespace pycomm {

/// Computes a checksum; pass the checksum of the preceding bytes as `before` to continue it.
PYCOMM_API uint32_t crc32c(Span<const uint8_t> data, uint32_t before = 0);

/// Names of the implementations that this processor has, fastest first; crc32c()
/// uses the first.
PYCOMM_API std::vector<std::string> crc32c_ways();
/// Computes it by one of these implementations, for tests and measurements.
PYCOMM_API uint32_t crc32c_by(const std::string& way, Span<const uint8_t> data,
                              uint32_t before = 0);

}  // namespace pycomm

// CRC-32C (Castagnoli), the checksum of TCP frames.
#pragma once
#include <string>
#include <vector>

#include "core/types.h"

namespace pycomm {

/// Where bytes most likely are.
enum class Where : uint8_t { cache, memory };

/// Continue a checksum by passing the one of the bytes before.
PYCOMM_API uint32_t crc32c(Span<const uint8_t> data, uint32_t before = 0,
                           Where where = Where::cache);

/// The ways to compute it that this processor has, fastest first for what is in a cache; crc32c()
/// takes the first.
PYCOMM_API std::vector<std::string> crc32c_ways();
/// The same by one of these ways; for tests and measurements.
PYCOMM_API uint32_t crc32c_by(const std::string& way, Span<const uint8_t> data,
                              uint32_t before = 0);

}  // namespace pycomm

// CRC-32C (Castagnoli), the checksum of TCP frames.
#pragma once
#include "core/types.h"

namespace pycomm {

/// Computes a checksum; pass the checksum of the preceding bytes as `before` to continue it.
PYCOMM_API uint32_t crc32c(Span<const uint8_t> data, uint32_t before = 0);

/// Computes it as crc32c() does on a processor without an instruction for it.
PYCOMM_API uint32_t crc32c_by_table(Span<const uint8_t> data, uint32_t before = 0);

}  // namespace pycomm

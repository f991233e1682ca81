// CRC-32C (Castagnoli), the checksum of TCP frames.
#pragma once
#include "core/types.h"

namespace pycomm {

/// Continue a checksum by passing the one of the bytes before.
PYCOMM_API uint32_t crc32c(Span<const uint8_t> data, uint32_t before = 0);
/// The same without the processor's instruction: what machines that lack it run.
PYCOMM_API uint32_t crc32c_by_table(Span<const uint8_t> data, uint32_t before = 0);

}  // namespace pycomm

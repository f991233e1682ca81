// scrypt (RFC 7914), with 16 MiB of memory: a key from a secret that people may have chosen, so
// slow that who tries secrets one after the other gets nowhere.
#pragma once
#include <string_view>

#include "core/sha256.h"

namespace pycomm {

/// Returns 32 bytes, by N = 16384, r = 8 and p = 1. It takes 50 ms and 16 MiB.
PYCOMM_API Digest scrypt(std::string_view secret, std::string_view salt);

}  // namespace pycomm

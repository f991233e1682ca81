// Option of the codecs that rotate.
#pragma once
#include "codecs/base/options.h"
#include "codecs/rotation/rotation.h"

namespace pycomm::codecs {

/// Returns the logarithm of the option "size" of the codecs that rotate, a power of two from 32 to
/// 4096.
inline int rotation_option(Options& options) {
  const int size = options.integer("size", 1024);
  const bool power = size > 0 && (size & (size - 1)) == 0;
  if (!power || size < static_cast<int>(kMinRotation) || size > static_cast<int>(kMaxRotation)) {
    options.fail("size=" + std::to_string(size) + ": use a power of two from 32 to 4096");
  }
  return __builtin_ctz(static_cast<unsigned>(size));
}

}  // namespace pycomm::codecs

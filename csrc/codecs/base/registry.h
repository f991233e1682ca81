// Registry functions: one for each codec, which makes it from its options.
#pragma once
#include <memory>

#include "codecs/base/codec.h"
#include "codecs/base/options.h"

namespace pycomm::codecs {

/// A function that makes a codec from its options. Each codec defines one, `make`, in its
/// namespace.
using Maker = std::unique_ptr<Codec>(Options& options);

}  // namespace pycomm::codecs

// Registry functions: one for each codec, which makes it from its options.
#pragma once
#include <memory>

#include "codecs/base/codec.h"
#include "codecs/base/options.h"

namespace pycomm::codecs {

/// A function that makes a codec from its options. Each codec defines one of this type.
using Maker = std::unique_ptr<Codec>(Options& options);

// clang-format off: one line each, as in the list of registry.cpp.
namespace cast { Maker make; }
namespace eden { Maker make; }
namespace lossless { Maker make; }
namespace mx { Maker make; }
namespace quant { Maker make; }
namespace randomk { Maker make; }
namespace rotate { Maker make; }
namespace sign { Maker make; }
namespace ternary { Maker make; }
namespace topk { Maker make; }
// clang-format on

}  // namespace pycomm::codecs

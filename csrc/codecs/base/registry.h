// Registry functions: each makes a codec from its options.
#pragma once
#include <memory>

#include "codecs/base/codec.h"
#include "codecs/base/options.h"

namespace pycomm::codecs {

namespace cast {
std::unique_ptr<Codec> make(Options& options);
}
namespace lossless {
std::unique_ptr<Codec> make(Options& options);
}
namespace mx {
std::unique_ptr<Codec> make(Options& options);
}
namespace quant {
std::unique_ptr<Codec> make(Options& options);
}
namespace sign {
std::unique_ptr<Codec> make(Options& options);
}
namespace rotate {
std::unique_ptr<Codec> make(Options& options);
}
namespace eden {
std::unique_ptr<Codec> make(Options& options);
}
namespace randomk {
std::unique_ptr<Codec> make(Options& options);
}
namespace ternary {
std::unique_ptr<Codec> make(Options& options);
}
namespace topk {
std::unique_ptr<Codec> make(Options& options);
}

}  // namespace pycomm::codecs

// PlanarCodec: a codec whose payload is two sections, so that it can be read and written piece by
// piece.
#pragma once
#include <variant>

#include "codecs/base/codec.h"
#include "codecs/cast.h"
#include "codecs/quant.h"
#include "codecs/sign.h"

namespace pycomm::codecs {

/// Format of such a codec, for kernels that combine it with another operation.
using PlanarFormat = std::variant<cast::Format, quant::Format, sign::Format>;

/// A payload is scales, then codes, each padded to a multiple of 4 bytes. In each section, a part
/// of a tensor has the same bytes as in the payload of the whole, if it begins and ends at
/// multiples of granule() where no section has to be padded; all multiples of 4096 values are.
class PlanarCodec : public Codec {
 public:
  /// Returns the place where the codes of this many values begin.
  virtual size_t codes_offset(size_t numel) const = 0;
  virtual PlanarFormat format() const = 0;
};

}  // namespace pycomm::codecs

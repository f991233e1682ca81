// Codecs whose payloads are two sections, so that they can be read and written piece by piece.
#pragma once
#include <variant>

#include "codecs/cast.h"
#include "codecs/codec.h"
#include "codecs/quant.h"
#include "codecs/sign.h"

namespace pycomm::codecs {

/// What kernels have to know of such a codec that go through it together with something else.
using PlanarFormat = std::variant<cast::Format, quant::Format, sign::Format>;

/// A payload is scales, then codes, each padded to a multiple of 4 bytes. A part of a tensor has in
/// each the bytes that the whole has there, if it begins and ends at multiples of granule() where
/// no section has to be padded; all multiples of 4096 values are.
class PlanarCodec : public Codec {
 public:
  /// Where the codes of so many values begin.
  virtual size_t codes_offset(size_t numel) const = 0;
  virtual PlanarFormat format() const = 0;
};

}  // namespace pycomm::codecs

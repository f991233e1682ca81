// Wire format of the lane of sends and receives: headers, and the bytes of a message after some.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace pycomm {

struct MessageHeader {
  enum class Kind : uint32_t {
    eager,    ///< a message; its bytes follow
    offer,    ///< a message; its bytes wait until a place with this tag is ready
    ready,    ///< a place for the first message with this tag that is or will be offered
    payload,  ///< the bytes for this place follow
    credit,   ///< so many bytes of eager messages have found their places
  };

  uint64_t bytes = 0;
  int64_t tag = 0;
  uint64_t place = 0;  ///< number of a place that is ready, from 1
  Kind kind = Kind::eager;
  uint32_t reserved = 0;
};

// All headers and bytes carry the same tag; the header says what they are.
inline const OpTag kLaneTag = [] {
  OpTag tag;
  tag.op = Op::send;
  tag.dtype = DType::uint8;
  return tag;
}();

// Size above which messages are offered first: one more round trip is little beside their bytes.
constexpr uint64_t kEagerBytes = 64 << 10;
// Bytes that a rank keeps of one peer at most, and what a message costs beside its bytes.
constexpr uint64_t kKeptBytes = 1 << 20;
constexpr uint64_t kMessageCost = 128;

}  // namespace pycomm

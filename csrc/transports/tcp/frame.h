// Frames: the pieces into which a message is cut. Each travels whole on one socket of its channel.
#pragma once
#include <string>

#include "core/op.h"
#include "core/types.h"

namespace pycomm::tcp {

/// The header of every frame, sent as it is in memory: little-endian, without padding.
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x4d435950;  // "PYCM"
  /// The place of the payload's CRC-32C: nowhere, in `payload`, or in `before` of the next header
  /// on this socket, whichever frame that is of.
  enum Checks : uint32_t { kUnchecked, kHere, kNext };

  uint32_t magic = kMagic;
  uint16_t version = 0;
  uint16_t lane = 0;
  uint64_t message = 0;  ///< number in its channel and direction, from 1; 0: an acknowledgement
  uint64_t offset = 0;   ///< of this frame in its message
  uint64_t size = 0;     ///< of the message
  uint32_t length = 0;   ///< of this frame, without header
  uint32_t tag_hash = 0;
  OpTag tag;              ///< in every frame, since frames of one message overtake each other
  uint64_t received = 0;  ///< bytes that have arrived of the other end's stream on this socket
  uint32_t checks = kUnchecked;
  uint32_t payload = 0;
  uint32_t before = 0;
  uint32_t checksum = 0;  ///< CRC-32C of all fields above
};
static_assert(sizeof(FrameHeader) == 128, "FrameHeader travels without padding");

/// Sets version and checksum.
void seal(FrameHeader& header);
/// Returns what is wrong with a header from the network; empty if it may be used.
std::string flaw_of(const FrameHeader& header, uint16_t lane);

}  // namespace pycomm::tcp

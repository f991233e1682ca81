// Frame headers: their seal and their check.
#include "transports/tcp/frame.h"

#include <cstddef>

#include "core/crc32c.h"
#include "transports/tcp/connect/handshake.h"

namespace pycomm::tcp {
namespace {

uint32_t checksum_of(const FrameHeader& header) {
  return crc32c({reinterpret_cast<const uint8_t*>(&header), offsetof(FrameHeader, checksum)});
}

}  // namespace

void seal(FrameHeader& header) {
  header.version = kWireVersion;
  header.checksum = checksum_of(header);
}

std::string flaw_of(const FrameHeader& header, uint16_t lane) {
  if (header.magic != FrameHeader::kMagic) return "no frame starts where one should";
  if (header.checksum != checksum_of(header)) return "the checksum of a frame header is wrong";
  if (header.version != kWireVersion) {
    return "a frame has version " + std::to_string(header.version) + ", ours is " +
           std::to_string(kWireVersion);
  }
  if (header.lane != lane) return "a frame is on the wrong lane";
  if (header.message == 0 && header.length > 0) return "a frame has no message number";
  if (header.offset > header.size || header.length > header.size - header.offset ||
      (header.length == 0 && header.size != 0)) {
    return "a frame does not fit into its message";
  }
  if (header.checks > FrameHeader::kNext ||
      (header.checks == FrameHeader::kNext && header.length == 0)) {
    return "a frame is checked in a way that is unknown";
  }
  return "";
}

}  // namespace pycomm::tcp

// Frame headers, their seal and their check; of the sent stream its ring of copies and its
// positions.
#include "transports/tcp/stream.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/crc32c.h"
#include "transports/tcp/connect/handshake.h"

namespace pycomm::tcp {
namespace {

constexpr size_t kFirstRing = 64 << 10;

iovec part(const uint8_t* data, size_t bytes) { return {const_cast<uint8_t*>(data), bytes}; }

uint32_t checksum_of(const FrameHeader& header) {
  return crc32c({reinterpret_cast<const uint8_t*>(&header), offsetof(FrameHeader, checksum)});
}

uint32_t checksum_of(const Resume& resume) {
  return crc32c({reinterpret_cast<const uint8_t*>(&resume), offsetof(Resume, checksum)});
}

}  // namespace

void seal(Resume& resume) { resume.checksum = checksum_of(resume); }

bool is_sound(const Resume& resume) {
  return resume.magic == Resume::kMagic && resume.checksum == checksum_of(resume);
}

void SentStream::push(const FrameHeader& header, const uint8_t* payload) {
  frames_.push_back({header, payload, end_});
  end_ = frames_.back().end();
}

size_t SentStream::next(std::array<iovec, 2>& parts, size_t& count, size_t limit) const {
  count = 0;
  if (position_ < kept_end_) {
    const size_t at = position_ & (ring_.size() - 1);
    const size_t bytes = std::min<size_t>(kept_end_ - position_, limit);
    const size_t first = std::min(bytes, ring_.size() - at);
    parts[count++] = part(ring_.data() + at, first);
    if (first < bytes) parts[count++] = part(ring_.data(), bytes - first);
    return bytes;
  }
  // This is the last frame, unless a new connection has to repeat some.
  auto frame = frames_.end();
  do --frame;
  while (frame->begin > position_);
  size_t skip = position_ - frame->begin;
  const size_t bytes = std::min<size_t>(frame->end() - position_, limit);
  size_t room = bytes;
  if (skip < sizeof frame->header) {
    const size_t head = std::min(sizeof frame->header - skip, room);
    parts[count++] = part(reinterpret_cast<const uint8_t*>(&frame->header) + skip, head);
    room -= head;
    skip = sizeof frame->header;
  }
  if (room > 0) parts[count++] = part(frame->payload + (skip - sizeof frame->header), room);
  return bytes;
}

Span<const uint8_t> SentStream::wrote(size_t bytes) {
  position_ += bytes;
  if (position_ <= high_) return {};
  // Bytes that are new belong to the last frame.
  const Frame& frame = frames_.back();
  const uint64_t payload = frame.begin + sizeof frame.header;
  const uint64_t first = std::max(high_, payload);
  high_ = position_;
  if (first >= high_) return {};
  return {frame.payload + (first - payload), static_cast<size_t>(high_ - first)};
}

void SentStream::copy(const Frame& frame) {
  kept_end_ = std::max(kept_end_, acknowledged_);
  size_t skip = kept_end_ - frame.begin;  // the other end has this much of it
  if (skip < sizeof frame.header) {
    copy(reinterpret_cast<const uint8_t*>(&frame.header) + skip, sizeof frame.header - skip);
    skip = sizeof frame.header;
  }
  copy(frame.payload + (skip - sizeof frame.header), frame.end() - kept_end_);
}

void SentStream::copy(const uint8_t* bytes, size_t count) {
  const size_t held = kept();
  if (held + count > ring_.size()) {
    size_t size = std::max(ring_.size(), kFirstRing);
    while (size < held + count) size *= 2;
    std::vector<uint8_t> larger(size);
    for (uint64_t b = kept_end_ - held; b < kept_end_;) {
      const size_t from = b & (ring_.size() - 1), to = b & (size - 1);
      const size_t run =
          std::min<size_t>({kept_end_ - b, ring_.size() - from, static_cast<uint64_t>(size - to)});
      std::memcpy(larger.data() + to, ring_.data() + from, run);
      b += run;
    }
    ring_ = std::move(larger);
  }
  while (count > 0) {
    const size_t to = kept_end_ & (ring_.size() - 1);
    const size_t run = std::min(count, ring_.size() - to);
    std::memcpy(ring_.data() + to, bytes, run);
    bytes += run;
    count -= run;
    kept_end_ += run;
  }
}

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

// Frames, the pieces into which a message is cut, each of which travels whole on one socket of its
// channel; and the sent stream, the bytes of one such socket over any number of consecutive
// connections. The stream holds the bytes that the other end has not acknowledged, so that a new
// connection resumes where the old one was cut.
//
//   acknowledged | kept here as a copy | frames, in the memory of their sender | end
//
// A frame is in use until it is acknowledged or kept; then its memory belongs to the sender again.
#pragma once
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <vector>

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

/// The first message of each end on a connection that resumes the streams of an earlier one.
struct Resume {
  static constexpr uint32_t kMagic = 0x52435950;  // "PYCR"

  uint32_t magic = kMagic;
  uint32_t generation = 0;
  uint64_t received = 0;  ///< bytes of the stream that have arrived: resume after them
  uint32_t reserved = 0;
  uint32_t checksum = 0;  ///< CRC-32C of all fields before it
};
static_assert(sizeof(Resume) == 24, "Resume travels without padding");

/// Sets the checksum.
void seal(Resume& resume);
bool is_sound(const Resume& resume);

class SentStream {
 public:
  void push(const FrameHeader& header, const uint8_t* payload);

  bool all_written() const { return position_ == end_; }
  /// True if at least the header of the last frame is written.
  bool last_header_written() const {
    return frames_.empty() || position_ >= frames_.back().begin + sizeof frames_.back().header;
  }
  bool all_acknowledged() const { return acknowledged_ == end_; }
  /// Returns the number of bytes of frames in use.
  size_t in_use() const { return frames_.empty() ? 0 : end_ - std::max(acknowledged_, kept_end_); }

  /// Gets the next bytes to write: at most `limit`, and not beyond a frame. Returns how many.
  size_t next(std::array<iovec, 2>& parts, size_t& count, size_t limit) const;
  /// Records a write. Returns the part of it that is payload and that no connection has had before.
  Span<const uint8_t> wrote(size_t bytes);

  /// False if the other end cannot have received so much, or has reported more before.
  bool may_resume_at(uint64_t received) const {
    return received >= acknowledged_ && received <= high_;
  }
  /// Resumes after these bytes, on a new connection.
  void resume_at(uint64_t received) { position_ = received; }

  /// Records that the other end has received so much; less than before means nothing. Calls
  /// release(header) for each frame that is no longer in use. Returns false if that many cannot be.
  template <typename Release>
  bool acknowledge(uint64_t received, const Release& release) {
    if (received > high_) return false;
    if (received <= acknowledged_) return true;
    acknowledged_ = received;
    position_ = std::max(position_, received);
    while (!frames_.empty() && frames_.front().end() <= received) pop(release);
    return true;
  }

  /// Copies the frames that are written to their end. Calls release(header) for each.
  template <typename Release>
  void keep(const Release& release) {
    while (!frames_.empty() && frames_.front().end() <= high_) {
      copy(frames_.front());
      pop(release);
    }
  }

 private:
  struct Frame {
    FrameHeader header;
    const uint8_t* payload;
    uint64_t begin;  // in the stream
    uint64_t end() const { return begin + sizeof header + header.length; }
  };

  template <typename Release>
  void pop(const Release& release) {
    const FrameHeader header = frames_.front().header;
    frames_.pop_front();
    release(header);
  }
  void copy(const Frame& frame);
  void copy(const uint8_t* bytes, size_t count);
  size_t kept() const { return kept_end_ > acknowledged_ ? kept_end_ - acknowledged_ : 0; }

  std::deque<Frame> frames_;
  std::vector<uint8_t> ring_;  // byte b of the stream at b modulo its size, a power of two
  uint64_t acknowledged_ = 0;
  uint64_t kept_end_ = 0;
  uint64_t position_ = 0;  // of the next byte to write
  uint64_t high_ = 0;      // end of the bytes that were ever written
  uint64_t end_ = 0;
};

}  // namespace pycomm::tcp

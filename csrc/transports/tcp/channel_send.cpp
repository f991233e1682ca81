// Sending side of a channel: cuts messages into frames, and writes them.
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "core/crc32c.h"
#include "transports/tcp/channel_socket.h"

namespace pycomm::tcp {

// The frame sizes: small enough that the sockets of a channel end about together, and that a frame
// stays in the processor's cache from its copy to its checksum; large enough that headers and
// system calls vanish.
constexpr size_t kSmallestFrame = 128 << 10;
constexpr size_t kLargestFrame = 256 << 10;
// Frames carry acknowledgements for the other direction. Where no frame goes that way for this many
// bytes, one without payload does.
constexpr size_t kAcknowledgeBytes = 1 << 20;
// A frame of at most this size is copied as soon as it is written, which ends the send; a longer
// one when there is nothing else to do and no acknowledgement has come.
constexpr size_t kKeepAtOnce = 16 << 10;
// The most that one call writes, so that both directions keep flowing.
constexpr size_t kCallLimit = 1 << 20;

bool TcpChannel::push(Socket& socket) {
  bool moved = false;
  while (socket.ready.writable && !socket.greeting &&
         (!socket.out.all_written() || take_frame(socket)) && write(socket)) {
    moved = true;
    if (!socket.out.all_written()) break;  // a long frame: let others move, too
  }
  return moved;
}

bool TcpChannel::take_frame(Socket& socket) {
  const bool bare = cutting_ == outgoing_.size() || !takes_frames(socket);
  if (bare && socket.unproven == 0 && socket.arrived - socket.acknowledged < kAcknowledgeBytes) {
    return false;
  }
  FrameHeader header;
  header.lane = poller_.lane();
  header.received = socket.acknowledged = socket.arrived;
  header.before = socket.out_crc;
  socket.proving = std::exchange(socket.unproven, 0);
  socket.out_crc = 0;
  const uint8_t* payload = bare ? nullptr : cut_frame(socket, header);
  seal(header);
  socket.out.push(header, payload);
  return true;
}

// Cuts the next part of the oldest message that has some left. Returns where it lies.
const uint8_t* TcpChannel::cut_frame(Socket& socket, FrameHeader& header) {
  Outgoing& message = outgoing_[cutting_];
  const size_t left = message.data.size - message.cut;
  size_t length = std::min(left, kLargestFrame);
  const size_t sockets = flow_.sockets(sockets_.size());
  if (sockets > 1) {
    const size_t share = left / (2 * sockets);
    length = std::min(left, std::clamp(share, kSmallestFrame, kLargestFrame));
  }
  header.message = sent_ + cutting_ + 1;
  header.offset = message.cut;
  header.size = message.data.size;
  header.length = static_cast<uint32_t>(length);
  header.tag_hash = message.tag_hash;
  header.tag = message.tag;
  message.frames++;
  message.cut += length;
  if (message.cut == message.data.size) cutting_++;
  if (checks_payload_ && length >= kSmallestFrame) {
    // After the kernel's copy the payload is in the cache for the checksum. The message stays until
    // the header with its checksum is written.
    header.checks = FrameHeader::kNext;
    socket.unproven = header.message;
    message.frames++;
  } else if (checks_payload_) {
    header.checks = FrameHeader::kHere;
    header.payload = crc32c(message.data.sub(header.offset, length), 0, Where::memory);
  }
  return message.data.data + header.offset;
}

// Makes one system call. Returns false if the socket or the pacer takes nothing now.
bool TcpChannel::write(Socket& socket) {
  std::array<iovec, 2> parts;
  size_t count = 0;
  size_t granted = poller_.pacer().take(socket.out.next(parts, count, kCallLimit));
  if (granted == 0) {
    poller_.starve();
    return false;
  }
  socket.out.next(parts, count, granted);
  const ssize_t n = socket.sock.send(parts.data(), count);
  const int error = errno;
  const size_t bytes = n > 0 ? static_cast<size_t>(n) : 0;
  poller_.pacer().give_back(granted - bytes);
  if (n < 0) {
    if (error != EINTR && error != EAGAIN) cut(socket, error_text(error));
    if (error == EAGAIN) socket.ready.writable = false;
    return false;
  }
  if (bytes < granted) socket.ready.writable = false;
  poller_.count_sent(bytes);
  const Span<const uint8_t> fresh = socket.out.wrote(bytes);
  if (socket.unproven != 0) socket.out_crc = crc32c(fresh, socket.out_crc);
  proof_written(socket);
  if (socket.out.all_written() && socket.out.in_use() <= kKeepAtOnce) keep(socket);
  return bytes > 0;
}

// Returns false if the peer cannot have received so much.
bool TcpChannel::acknowledge(Socket& socket, uint64_t received) {
  const auto release = [this](const FrameHeader& header) { released(header.message); };
  if (!socket.out.acknowledge(received, release)) return false;
  proof_written(socket);  // after a cut the peer may have all that we were about to repeat
  return true;
}

void TcpChannel::proof_written(Socket& socket) {
  if (socket.out.last_header_written()) released(std::exchange(socket.proving, 0));
}

void TcpChannel::keep(Socket& socket) {
  socket.out.keep([this](const FrameHeader& header) { released(header.message); });
}

// Notes that a frame's memory is no longer in use, or that its checksum is written. Messages leave
// in order.
void TcpChannel::released(uint64_t number) {
  if (number == 0) return;
  const size_t place = number - sent_ - 1;
  Outgoing& message = outgoing_[place];
  message.frames--;
  message.done = message.frames == 0 && place < cutting_;
  while (!outgoing_.empty() && outgoing_.front().done) {
    outgoing_.pop_front();
    sent_.fetch_add(1, std::memory_order_release);
    cutting_--;
  }
}

}  // namespace pycomm::tcp

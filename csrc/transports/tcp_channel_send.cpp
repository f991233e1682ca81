// Channel: messages are cut into frames, and frames are written.
#include <algorithm>
#include <array>
#include <cerrno>

#include "core/crc32c.h"
#include "transports/tcp_channel_socket.h"

namespace pycomm::tcp {

// Frames: small enough that the sockets of a channel end about together, and that a frame stays in
// the processor's cache from its checksum to its copy; large enough that headers and system calls
// vanish.
constexpr size_t kSmallestFrame = 128 << 10;
constexpr size_t kLargestFrame = 256 << 10;
// Frames carry acknowledgements for the other direction. Where none goes that way for so many
// bytes, a frame without payload does.
constexpr size_t kAcknowledgeBytes = 1 << 20;
// So little is copied at once when it is written, which ends the send; more when nothing else is to
// be done and no acknowledgement has come.
constexpr size_t kKeepAtOnce = 16 << 10;
// One call writes at most so much, so that both directions keep flowing.
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
  FrameHeader header;
  header.lane = poller_.lane();
  header.received = socket.arrived;
  if (cutting_ == outgoing_.size()) {
    if (socket.arrived - socket.acknowledged < kAcknowledgeBytes) return false;
    socket.acknowledged = socket.arrived;
    seal(header);
    socket.out.push(header, nullptr);
    return true;
  }
  socket.acknowledged = socket.arrived;
  Outgoing& message = outgoing_[cutting_];
  const size_t left = message.data.size - message.cut;
  size_t length = std::min(left, kLargestFrame);
  if (sockets_.size() > 1) {
    const size_t share = left / (2 * sockets_.size());
    length = std::min(left, std::clamp(share, kSmallestFrame, kLargestFrame));
  }
  header.message = sent_ + cutting_ + 1;
  header.offset = message.cut;
  header.size = message.data.size;
  header.length = static_cast<uint32_t>(length);
  header.tag_hash = message.tag_hash;
  header.tag = message.tag;
  header.checks = checks_payload_;
  // The kernel copies the frame next: so it has to come from memory only once.
  if (checks_payload_) {
    header.payload = crc32c(message.data.sub(header.offset, length), 0, Where::memory);
  }
  seal(header);
  socket.out.push(header, message.data.data + header.offset);
  message.frames++;
  message.cut += length;
  if (message.cut == message.data.size) cutting_++;
  return true;
}

// One system call. False if the socket or the pacer takes nothing now.
bool TcpChannel::write(Socket& socket) {
  std::array<iovec, 2> parts;
  size_t count = 0;
  size_t granted = poller_.pacer().take(socket.out.next(parts, count, kCallLimit));
  if (granted == 0) {
    poller_.starve();
    return false;
  }
  socket.out.next(parts, count, granted);
  const ssize_t n = socket.wire.send(parts.data(), count);
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
  socket.out.wrote(bytes);
  if (socket.out.all_written() && socket.out.in_use() <= kKeepAtOnce) keep(socket);
  return bytes > 0;
}

void TcpChannel::keep(Socket& socket) {
  socket.out.keep([this](const FrameHeader& header) { released(header); });
}

// A frame's memory is no longer in use. Messages leave in order.
void TcpChannel::released(const FrameHeader& header) {
  if (header.message == 0) return;
  const size_t place = header.message - sent_ - 1;
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

// Receiving side of a channel: reads frames into the messages that have a posted receive.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/crc32c.h"
#include "transports/mismatch.h"
#include "transports/tcp/channel_socket.h"

namespace pycomm::tcp {

// The wake-up threshold while a long frame comes in, so that not every packet wakes us.
constexpr size_t kWakeBytes = 256 << 10;
// The most that one call reads, so that both directions keep flowing.
constexpr size_t kCallLimit = 1 << 20;

bool TcpChannel::pull(Socket& socket) {
  const uint64_t before = received_;
  bool moved = false;
  // We may also be waiting for an acknowledgement.
  while (!(incoming_.empty() && outgoing_.empty()) && (socket.reading || pull_header(socket)) &&
         pull_payload(socket)) {
    moved = true;
    if (socket.reading) break;  // a long frame: let others move, too
  }
  return moved || received_ > before;
}

bool TcpChannel::has_header(Socket& socket) {
  while (socket.staged() < sizeof(FrameHeader)) {
    if (!socket.ready.readable) return false;
    if (read(socket, {}) == 0) return false;
  }
  return true;
}

bool TcpChannel::pull_header(Socket& socket) {
  do {
    if (!has_header(socket)) return false;
    std::memcpy(&socket.in, socket.stage.data() + socket.begin, sizeof(FrameHeader));
    socket.begin += sizeof(FrameHeader);
    const std::string flaw = flaw_of(socket.in, poller_.lane());
    if (!flaw.empty()) throw_damaged(flaw);
    if (!acknowledge(socket, socket.in.received)) {
      throw_damaged("it acknowledges bytes that were not sent");
    }
    if (std::exchange(socket.unproved, false)) {
      check_payload(socket.last, socket.last_crc, socket.in.before);
      frame_read(socket.last);
    }
  } while (socket.in.message == 0);
  socket.reading = true;
  socket.accepted = false;
  socket.in_done = 0;
  socket.in_crc = 0;
  return true;
}

bool TcpChannel::pull_payload(Socket& socket) {
  const FrameHeader& header = socket.in;
  if (header.message <= received_) throw_damaged("a frame arrived twice");
  if (!has_receive(header.message)) return false;
  Incoming& message = incoming_[header.message - received_ - 1];
  if (!std::exchange(socket.accepted, true)) accept_frame(header, message);
  uint8_t* to = message.data.data + header.offset;

  // Bytes that have just arrived are in the processor's cache.
  const auto take_in = [&](size_t bytes) {
    if (header.checks) socket.in_crc = crc32c({to + socket.in_done, bytes}, socket.in_crc);
    socket.in_done += bytes;
  };
  const size_t ahead = std::min(socket.staged(), header.length - socket.in_done);
  if (ahead > 0) {
    std::memcpy(to + socket.in_done, socket.stage.data() + socket.begin, ahead);
    socket.begin += ahead;
    take_in(ahead);
  }
  const size_t left = header.length - socket.in_done;
  size_t bytes = 0;
  if (left > 0 && socket.ready.readable) {
    bytes = read(socket, {to + socket.in_done, left});
    take_in(bytes);
  }
  if (socket.in_done < header.length) {
    const size_t rest = header.length - socket.in_done;
    socket.wake_at(rest < kWakeBytes / 2 && socket.wake_bytes == 1 ? 1
                                                                   : std::min(rest, kWakeBytes));
    return ahead + bytes > 0;
  }
  socket.wake_at(1);
  socket.reading = false;
  if (header.checks == FrameHeader::kNext) {
    socket.unproved = true;
    socket.last = header;
    socket.last_crc = socket.in_crc;
    return true;
  }
  if (header.checks == FrameHeader::kHere) check_payload(header, socket.in_crc, header.payload);
  frame_read(header);
  return true;
}

// The frames of a message are never longer than it in sum, so it stays until all of them are read.
void TcpChannel::accept_frame(const FrameHeader& header, Incoming& message) const {
  if (header.tag_hash != message.tag_hash || header.size != message.data.size) {
    throw mismatch({poller_.rank(), message.data.size, message.tag},
                   {peer_, header.size, header.tag});
  }
  if (header.length > message.data.size - message.begun || message.done) {
    throw_damaged("a frame arrived twice");
  }
  message.begun += header.length;
}

void TcpChannel::check_payload(const FrameHeader& header, uint32_t crc, uint32_t expected) const {
  if (crc == expected) return;
  throw_damaged("bytes " + std::to_string(header.offset) + " to " +
                std::to_string(header.offset + header.length) + " of " +
                std::to_string(header.size) + " were changed on their way");
}

void TcpChannel::frame_read(const FrameHeader& header) {
  Incoming& message = incoming_[header.message - received_ - 1];
  message.read += header.length;
  message.done = message.read == message.data.size;
  while (!incoming_.empty() && incoming_.front().done) {
    incoming_.pop_front();
    received_.fetch_add(1, std::memory_order_release);
  }
}

// Makes one system call: it reads straight into the payload, and the bytes after it into the stage.
// Returns the bytes of the payload; for an empty payload, those that went to the stage.
size_t TcpChannel::read(Socket& socket, Span<uint8_t> payload) {
  if (socket.begin > 0) {
    std::memmove(socket.stage.data(), socket.stage.data() + socket.begin, socket.staged());
    socket.end -= socket.begin;
    socket.begin = 0;
  }
  std::array<iovec, 2> parts;
  size_t count = 0;
  const size_t direct = std::min(payload.size, kCallLimit);
  size_t room = direct;
  if (direct > 0) parts[count++] = {payload.data, direct};
  if (direct == payload.size) {
    parts[count++] = {socket.stage.data() + socket.end, kStage - socket.end};
    room += kStage - socket.end;
  }
  const ssize_t n = socket.sock.receive(parts.data(), count);
  if (n < 0) {
    if (errno == EINTR) return 0;
    if (errno == EAGAIN) {
      socket.ready.readable = socket.ready.ends;
    } else {
      cut(socket, error_text(errno));
    }
    return 0;
  }
  if (n == 0) {
    cut(socket, "it closed the connection");
    return 0;
  }
  const auto bytes = static_cast<size_t>(n);
  socket.arrived += bytes;
  // Less than asked for means that the socket is empty; epoll tells when there is more.
  if (bytes < room) socket.ready.readable = socket.ready.ends;
  if (bytes > direct) socket.end += bytes - direct;
  return direct > 0 ? std::min(bytes, direct) : bytes;
}

}  // namespace pycomm::tcp

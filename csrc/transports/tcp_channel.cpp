// Channel over several sockets with work stealing: whichever socket can be written takes the next
// frame of the oldest message that has bytes left.
//
// Frames leave in the order of messages, so on every socket the message numbers ascend. A frame
// whose receive is not posted yet stops only its own socket, and what is before it in order is
// never behind it: no deadlock.
#include "transports/tcp_channel.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/crc32c.h"
#include "transports/mismatch.h"

namespace pycomm::tcp {
namespace {

// Frames: small enough that the sockets of a channel end about together, and that a frame stays in
// the processor's cache from its checksum to its copy; large enough that headers and system calls
// vanish.
constexpr size_t kSmallestFrame = 128 << 10;
constexpr size_t kLargestFrame = 256 << 10;
// One system call moves at most this much, so that both directions keep flowing.
constexpr size_t kCallLimit = 1 << 20;
// Headers are read together with what follows: a small message takes one system call.
constexpr size_t kStage = 2048;
// While a long frame comes in we are woken for so much at once, not for every packet.
constexpr size_t kWakeBytes = 256 << 10;

}  // namespace

struct TcpChannel::Socket {
  Fd fd;
  Readiness ready;
  bool ended = false;  // for reading

  // The frame being written: header, then payload.
  bool writing = false;
  FrameHeader out;
  size_t out_done = 0;

  // The frame being read, once its header is here.
  bool reading = false;
  FrameHeader in;
  size_t in_done = 0;  // of its payload
  uint32_t in_crc = 0;
  size_t wake_bytes = 1;

  // Bytes that were read ahead: stage[begin, end).
  std::array<uint8_t, kStage> stage;
  size_t begin = 0, end = 0;

  size_t staged() const { return end - begin; }

  // Readable means from now on: so many bytes are there, or the end.
  void wake_at(size_t bytes) {
    if (bytes == wake_bytes) return;
    wake_bytes = bytes;
    set_wake_bytes(fd.get(), bytes);
  }
};

TcpChannel::TcpChannel(int peer, Connector& connector, Poller& poller, bool checks_payload)
    : peer_(peer), connector_(connector), poller_(poller), checks_payload_(checks_payload) {}

TcpChannel::~TcpChannel() = default;

uint64_t TcpChannel::send(const OpTag& tag, Span<const uint8_t> data) {
  Outgoing message;
  message.tag = tag;
  message.tag_hash = tag.hash();
  message.data = data;
  outgoing_.push_back(message);
  const uint64_t ticket = sent_ + outgoing_.size();
  if (sockets_.empty() && !opening_ && !connected()) {
    opening_ = true;
    connector_.open(peer_, poller_.lane());
  }
  if (cutting_ + 1 == outgoing_.size()) {
    for (auto& socket : sockets_) push(*socket);
  }
  return ticket;
}

uint64_t TcpChannel::recv(const OpTag& tag, Span<uint8_t> data) {
  Incoming message;
  message.tag = tag;
  message.tag_hash = tag.hash();
  message.data = data;
  incoming_.push_back(message);
  return received_ + incoming_.size();
}

bool TcpChannel::progress() {
  if (poller_.control().aborted()) poller_.control().check();
  if (outgoing_.empty() && incoming_.empty()) return false;
  if (sockets_.empty() && !connected()) return false;
  if (advance()) return true;
  bool moved = false;
  if (poller_.polls() == polls_seen_) {
    poller_.poll();
    moved = advance();
  }
  polls_seen_ = poller_.polls();
  if (!moved) {
    if (!incoming_.empty()) poller_.expect(incoming_.front().data.size - incoming_.front().read);
    if (!outgoing_.empty()) poller_.expect(outgoing_.front().data.size - outgoing_.front().written);
  }
  return moved;
}

// Takes the sockets as soon as they stand.
bool TcpChannel::connected() {
  const int lane = poller_.lane();
  if (!connector_.ready(peer_, lane)) {
    const bool gone = poller_.control().gone(peer_);
    if (!gone && !connector_.troubled()) return false;
    const std::string obstacle = connector_.obstacle(peer_, lane, gone);
    if (!obstacle.empty()) throw_lost(obstacle);
    if (!connector_.ready(peer_, lane)) return false;
  }
  for (Fd& fd : connector_.take(peer_, lane)) {
    sockets_.push_back(std::make_unique<Socket>());
    sockets_.back()->fd = std::move(fd);
    poller_.watch(sockets_.back()->fd.get(), sockets_.back()->ready);
  }
  return true;
}

bool TcpChannel::advance() {
  bool moved = false;
  for (auto& socket : sockets_) {
    moved |= pull(*socket);
    moved |= push(*socket);
  }
  return moved;
}

// ------------------------------------------------------------------------------ sending

bool TcpChannel::push(Socket& socket) {
  bool moved = false;
  while (socket.ready.writable && (socket.writing || take_frame(socket)) && write(socket)) {
    moved = true;
    if (socket.writing) break;  // a long frame: let others move, too
  }
  return moved;
}

bool TcpChannel::take_frame(Socket& socket) {
  if (cutting_ == outgoing_.size()) return false;
  Outgoing& message = outgoing_[cutting_];
  const size_t left = message.data.size - message.cut;
  size_t length = std::min(left, kLargestFrame);
  if (sockets_.size() > 1) {
    const size_t share = left / (2 * sockets_.size());
    length = std::min(left, std::clamp(share, kSmallestFrame, kLargestFrame));
  }
  FrameHeader& header = socket.out;
  header.lane = poller_.lane();
  header.message = sent_ + cutting_ + 1;
  header.offset = message.cut;
  header.size = message.data.size;
  header.length = static_cast<uint32_t>(length);
  header.tag_hash = message.tag_hash;
  header.tag = message.tag;
  header.checks = checks_payload_;
  // The kernel copies the frame next: so it has to come from memory only once.
  if (checks_payload_) header.payload = crc32c(message.data.sub(header.offset, length));
  seal(header);
  socket.out_done = 0;
  socket.writing = true;
  message.cut += length;
  if (message.cut == message.data.size) cutting_++;
  return true;
}

// One system call. False if the socket or the pacer takes nothing now.
bool TcpChannel::write(Socket& socket) {
  const FrameHeader& header = socket.out;
  const size_t all = sizeof header + header.length;
  const size_t wanted = std::min(all - socket.out_done, kCallLimit);
  const size_t granted = poller_.pacer().take(wanted);
  if (granted == 0) {
    poller_.starve();
    return false;
  }
  std::array<iovec, 2> parts;
  size_t count = 0;
  size_t room = granted;
  if (socket.out_done < sizeof header) {
    const size_t bytes = std::min(sizeof header - socket.out_done, room);
    parts[count++] = {reinterpret_cast<uint8_t*>(&socket.out) + socket.out_done, bytes};
    room -= bytes;
  }
  if (room > 0) {
    const auto& data = outgoing_[header.message - sent_ - 1].data;
    const size_t skip = std::max(socket.out_done, sizeof header) - sizeof header;
    parts[count++] = {const_cast<uint8_t*>(data.data) + header.offset + skip, room};
  }
  msghdr call = {};
  call.msg_iov = parts.data();
  call.msg_iovlen = count;
  const ssize_t n = ::sendmsg(socket.fd.get(), &call, MSG_DONTWAIT | MSG_NOSIGNAL);
  const size_t bytes = n > 0 ? static_cast<size_t>(n) : 0;
  poller_.pacer().give_back(granted - bytes);
  if (n < 0) {
    if (errno == EINTR) return false;
    if (errno != EAGAIN) throw_lost(error_text(errno));
  }
  if (bytes < granted) socket.ready.writable = false;
  poller_.count_sent(bytes);
  socket.out_done += bytes;
  if (socket.out_done == all) frame_written(socket);
  return bytes > 0;
}

void TcpChannel::frame_written(Socket& socket) {
  socket.writing = false;
  Outgoing& message = outgoing_[socket.out.message - sent_ - 1];
  message.written += socket.out.length;
  message.done = message.written == message.data.size;
  while (!outgoing_.empty() && outgoing_.front().done) {
    outgoing_.pop_front();
    sent_++;
    cutting_--;
  }
}

// ------------------------------------------------------------------------------ receiving

bool TcpChannel::pull(Socket& socket) {
  bool moved = false;
  while (!incoming_.empty() && (socket.reading || pull_header(socket)) && pull_payload(socket)) {
    moved = true;
    if (socket.reading) break;  // a long frame: let others move, too
  }
  return moved;
}

bool TcpChannel::pull_header(Socket& socket) {
  while (socket.staged() < sizeof(FrameHeader)) {
    if (!socket.ready.readable) return false;
    if (read(socket, {}) == 0) return false;
  }
  std::memcpy(&socket.in, socket.stage.data() + socket.begin, sizeof(FrameHeader));
  socket.begin += sizeof(FrameHeader);
  const std::string flaw = flaw_of(socket.in, poller_.lane());
  if (!flaw.empty()) throw_damaged(flaw);
  if (socket.in.message <= received_) throw_damaged("a frame came twice");
  socket.reading = true;
  socket.in_done = 0;
  socket.in_crc = 0;
  return true;
}

bool TcpChannel::pull_payload(Socket& socket) {
  const FrameHeader& header = socket.in;
  const size_t place = header.message - received_ - 1;
  if (place >= incoming_.size()) return false;
  Incoming& message = incoming_[place];
  if (socket.in_done == 0) check_frame(header, message);
  uint8_t* to = message.data.data + header.offset;

  // What has just arrived is in the processor's cache.
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
  if (header.checks && socket.in_crc != header.payload) {
    throw_damaged("bytes " + std::to_string(header.offset) + " to " +
                  std::to_string(header.offset + header.length) + " of " +
                  std::to_string(header.size) + " were changed on their way");
  }
  frame_read(socket);
  return true;
}

void TcpChannel::check_frame(const FrameHeader& header, const Incoming& message) const {
  if (header.tag_hash != message.tag_hash || header.size != message.data.size) {
    throw mismatch({poller_.rank(), message.data.size, message.tag},
                   {peer_, header.size, header.tag});
  }
  if (header.length > message.data.size - message.read || message.done) {
    throw_damaged("a frame came twice");
  }
}

void TcpChannel::frame_read(Socket& socket) {
  socket.reading = false;
  Incoming& message = incoming_[socket.in.message - received_ - 1];
  message.read += socket.in.length;
  message.done = message.read == message.data.size;
  while (!incoming_.empty() && incoming_.front().done) {
    incoming_.pop_front();
    received_++;
  }
}

// One system call: straight into the payload, and what follows it into the stage. Returns the bytes
// of the payload; for an empty payload, those that went to the stage.
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
  msghdr call = {};
  call.msg_iov = parts.data();
  call.msg_iovlen = count;
  const ssize_t n = ::recvmsg(socket.fd.get(), &call, MSG_DONTWAIT);
  if (n < 0) {
    if (errno == EINTR) return 0;
    if (errno != EAGAIN) throw_lost(error_text(errno));
    socket.ready.readable = socket.ready.ends;
    return 0;
  }
  if (n == 0) {
    end_of(socket);
    return 0;
  }
  const auto bytes = static_cast<size_t>(n);
  // Less than asked for: the socket is empty, and epoll tells when there is more.
  if (bytes < room) socket.ready.readable = socket.ready.ends;
  if (bytes > direct) socket.end += bytes - direct;
  return direct > 0 ? std::min(bytes, direct) : bytes;
}

// The peer sends nothing more on this socket. That is a loss only if something is still to come.
void TcpChannel::end_of(Socket& socket) {
  socket.ended = true;
  socket.ready.readable = false;
  socket.ready.ends = false;
  const bool torn = socket.reading || socket.staged() > 0;
  const bool all_ended =
      std::all_of(sockets_.begin(), sockets_.end(), [](const auto& other) { return other->ended; });
  if (torn || all_ended) throw_lost("it closed the connection");
}

// ------------------------------------------------------------------------------ the end

void TcpChannel::finish() {
  for (auto& socket : sockets_) ::shutdown(socket->fd.get(), SHUT_WR);
}

size_t TcpChannel::unacknowledged() const {
  size_t bytes = 0;
  for (const auto& socket : sockets_) bytes += tcp::unacknowledged(socket->fd.get());
  return bytes;
}

void TcpChannel::throw_damaged(const std::string& how) const {
  throw Error("tcp: rank " + std::to_string(poller_.rank()) + " cannot use what came from rank " +
              std::to_string(peer_) + " for " + describe(incoming_.front().tag) + ": " + how +
              "; look for damaged memory or network hardware between the two");
}

void TcpChannel::throw_lost(const std::string& how) const {
  const bool receiving = !incoming_.empty();
  const OpTag& tag = receiving ? incoming_.front().tag : outgoing_.front().tag;
  poller_.control().throw_lost(peer_, how + " while rank " + std::to_string(poller_.rank()) +
                                          (receiving ? " waits for " : " sends ") + describe(tag));
}

}  // namespace pycomm::tcp

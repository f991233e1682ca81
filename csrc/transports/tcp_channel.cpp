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
#include "transports/tcp_channel_socket.h"

namespace pycomm::tcp {
namespace {

// Frames: small enough that the sockets of a channel end about together, and that a frame stays in
// the processor's cache from its checksum to its copy; large enough that headers and system calls
// vanish.
constexpr size_t kSmallestFrame = 128 << 10;
constexpr size_t kLargestFrame = 256 << 10;
// One system call moves at most this much, so that both directions keep flowing.
constexpr size_t kCallLimit = 1 << 20;
// While a long frame comes in we are woken for so much at once, not for every packet.
constexpr size_t kWakeBytes = 256 << 10;
// Frames carry acknowledgements for the other direction. Where none goes that way for so many
// bytes, a frame without payload does.
constexpr size_t kAcknowledgeBytes = 1 << 20;
// So little is copied at once when it is written, which ends the send; more when nothing else is to
// be done and no acknowledgement has come.
constexpr size_t kKeepAtOnce = 16 << 10;

}  // namespace

TcpChannel::TcpChannel(int peer, Connector& connector, Poller& poller, bool checks_payload)
    : peer_(peer), connector_(connector), poller_(poller), checks_payload_(checks_payload) {}

TcpChannel::~TcpChannel() = default;

uint64_t TcpChannel::send(const OpTag& tag, Span<const uint8_t> data) {
  Outgoing message;
  message.tag = tag;
  message.tag_hash = tag.hash();
  message.data = data;
  std::lock_guard<std::mutex> lock(poller_.mutex());
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
  std::lock_guard<std::mutex> lock(poller_.mutex());
  incoming_.push_back(message);
  return received_ + incoming_.size();
}

bool TcpChannel::progress() {
  if (poller_.control().aborted()) poller_.control().check();
  std::lock_guard<std::mutex> lock(poller_.mutex());
  if (outgoing_.empty() && incoming_.empty()) return false;
  if (sockets_.empty() && !connected()) return false;
  if (connector_.fresh(peer_, poller_.lane())) adopt_connections();
  if (advance()) return true;
  bool moved = false;
  if (poller_.polls() == polls_seen_) {
    poller_.poll();
    moved = advance();
  }
  polls_seen_ = poller_.polls();
  if (moved || let_go()) return true;
  if (cuts_ > 0) look_for_loss();
  if (!incoming_.empty()) poller_.expect(incoming_.front().data.size - incoming_.front().read);
  if (!outgoing_.empty()) poller_.expect(outgoing_.front().data.size - outgoing_.front().cut);
  return false;
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
  for (int number = 0; number < connector_.mesh().sockets; number++) {
    sockets_.push_back(std::make_unique<Socket>());
    sockets_.back()->number = number;
  }
  cuts_ = connector_.mesh().sockets;
  adopt_connections();
  return true;
}

bool TcpChannel::advance() {
  bool moved = false;
  for (auto& socket : sockets_) {
    if (socket->greeting && !greet(*socket)) continue;
    moved |= pull(*socket);
    moved |= push(*socket);
  }
  return moved;
}

// ------------------------------------------------------------------------------ sending

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
  if (checks_payload_) header.payload = crc32c(message.data.sub(header.offset, length));
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
  msghdr call = {};
  call.msg_iov = parts.data();
  call.msg_iovlen = count;
  const ssize_t n = ::sendmsg(socket.fd.get(), &call, MSG_DONTWAIT | MSG_NOSIGNAL);
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

// ------------------------------------------------------------------------------ receiving

bool TcpChannel::pull(Socket& socket) {
  bool moved = false;
  // What we wait for may be an acknowledgement.
  while (!(incoming_.empty() && outgoing_.empty()) && (socket.reading || pull_header(socket)) &&
         pull_payload(socket)) {
    moved = true;
    if (socket.reading) break;  // a long frame: let others move, too
  }
  return moved;
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
    const auto release = [this](const FrameHeader& header) { released(header); };
    if (!socket.out.acknowledge(socket.in.received, release)) {
      throw_damaged("it acknowledges what was not sent");
    }
  } while (socket.in.message == 0);
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
    received_.fetch_add(1, std::memory_order_release);
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
  // Less than asked for: the socket is empty, and epoll tells when there is more.
  if (bytes < room) socket.ready.readable = socket.ready.ends;
  if (bytes > direct) socket.end += bytes - direct;
  return direct > 0 ? std::min(bytes, direct) : bytes;
}

// ------------------------------------------------------------------------------ the end

void TcpChannel::finish() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  for (auto& socket : sockets_) {
    if (socket->fd) ::shutdown(socket->fd.get(), SHUT_WR);
  }
}

LinkUse TcpChannel::use() const {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  LinkUse sum;
  for (const auto& socket : sockets_) {
    const LinkUse use = link_use(socket->fd.get());
    sum.bytes += use.bytes;
    sum.busy_us += use.busy_us;
  }
  return sum;
}

size_t TcpChannel::unacknowledged() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  size_t bytes = 0;
  for (const auto& socket : sockets_) bytes += tcp::unacknowledged(socket->fd.get());
  return bytes;
}

void TcpChannel::throw_damaged(const std::string& how) const {
  const OpTag tag = !incoming_.empty()   ? incoming_.front().tag
                    : !outgoing_.empty() ? outgoing_.front().tag
                                         : OpTag();
  throw Error("tcp: rank " + std::to_string(poller_.rank()) + " cannot use what came from rank " +
              std::to_string(peer_) + " for " + describe(tag) + ": " + how +
              "; look for damaged memory or network hardware between the two");
}

void TcpChannel::throw_lost(const std::string& how) const {
  const bool receiving = !incoming_.empty();
  const OpTag& tag = receiving ? incoming_.front().tag : outgoing_.front().tag;
  poller_.control().throw_lost(peer_, how + " while rank " + std::to_string(poller_.rank()) +
                                          (receiving ? " waits for " : " sends ") + describe(tag));
}

}  // namespace pycomm::tcp

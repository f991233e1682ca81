// Channel over several sockets with work stealing: whichever socket can be written takes the next
// frame of the oldest message that has bytes left.
//
// Frames leave in the order of messages, so on every socket the message numbers ascend. A frame
// whose receive is not posted yet stops only its own socket, and the frames that precede it in
// order are never behind it, so there is no deadlock.
#include "transports/tcp/channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/crc32c.h"
#include "transports/tcp/net/tuning.h"
#include "transports/tcp/stream.h"

namespace pycomm::tcp {
namespace {

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
// The wake-up threshold while a long frame comes in, so that not every packet wakes us.
constexpr size_t kWakeBytes = 256 << 10;
// The most that one call reads or writes, so that both directions keep flowing.
constexpr size_t kCallLimit = 1 << 20;
// Headers are read together with the bytes after them: a small message takes one system call.
constexpr size_t kStage = 2048;
// If a stream on a slow link pauses for this long, a copy costs nothing beside the link.
constexpr auto kStallLimit = std::chrono::milliseconds(20);
// The interval at which a channel looks at its paths.
constexpr auto kPathInterval = std::chrono::milliseconds(100);

}  // namespace

// One socket of the channel: its outgoing stream and incoming frames, over consecutive connections.
struct TcpChannel::Socket {
  SecureSocket sock;
  Readiness ready;
  int number = 0;
  uint32_t generation = 0;  // counts the connections from 0
  std::string cut_by;       // why the last one ended
  bool reopening = false;   // a new one is on its way

  // On a later connection both ends first send a Resume.
  bool greeting = false;
  Resume theirs;
  size_t greeted = 0;

  SentStream out;
  // `unproven` is the message of a frame whose checksum goes with the next header, or 0; `proving`
  // is the message of the frame whose checksum is in the last header, until that is written.
  uint64_t unproven = 0, proving = 0;
  uint32_t out_crc = 0;
  uint64_t arrived = 0;       // bytes of the incoming stream
  uint64_t acknowledged = 0;  // of these, the bytes that we have acknowledged

  // The frame being read, once its header has arrived.
  bool reading = false;
  bool accepted = false;  // it matches its receive
  FrameHeader in;
  size_t in_done = 0;  // of its payload
  uint32_t in_crc = 0;
  // The frame before it, if its checksum is still to come.
  bool unproved = false;
  FrameHeader last;
  uint32_t last_crc = 0;
  size_t wake_bytes = 1;

  // Bytes that were read ahead: stage[begin, end).
  std::array<uint8_t, kStage> stage;
  size_t begin = 0, end = 0;

  size_t staged() const { return end - begin; }

  // Makes the socket readable only once this many bytes are there, or the end.
  void wake_at(size_t bytes) {
    // Some bytes of an encrypted connection may have left the kernel already.
    if (sock.encrypted()) bytes = bytes > TlsSession::kAhead ? bytes - TlsSession::kAhead : 1;
    if (bytes == wake_bytes || !sock) return;
    wake_bytes = bytes;
    set_wake_bytes(sock.get(), bytes);
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
  std::lock_guard<std::mutex> lock(poller_.mutex());
  outgoing_.push_back(message);
  const uint64_t ticket = sent_ + outgoing_.size();
  if (sockets_.empty() && !opening_ && !connected()) {
    opening_ = true;
    connector_.request({peer_, poller_.lane()});
  }
  if (cutting_ + 1 == outgoing_.size()) {
    // Short messages stay on the first: TCP learns from the packets behind it that one of them is
    // lost, and without any only by its timer.
    for (const auto& socket : sockets_) push(*socket);
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
  bool moved = advance();
  if (!moved) {
    if (poller_.polls() == polls_seen_) {
      poller_.poll();
      moved = advance();
    }
    polls_seen_ = poller_.polls();
  }
  if (moved) stalled_since_ = {};
  if (moved || release_buffers()) return true;
  if (cuts_ > 0) check_for_loss();
  if (!incoming_.empty()) poller_.expect(incoming_.front().data.size - incoming_.front().read);
  if (!outgoing_.empty()) poller_.expect(outgoing_.front().data.size - outgoing_.front().cut);
  return false;
}

// Takes the sockets as soon as they are connected. Returns true once it has them.
bool TcpChannel::connected() {
  const int lane = poller_.lane();
  if (!connector_.ready(peer_, lane)) {
    const bool gone = poller_.control().gone(peer_);
    if (!gone && !connector_.has_errors()) return false;
    const std::string connection_error = connector_.connection_error(peer_, lane, gone);
    if (!connection_error.empty()) throw_lost(connection_error);
    if (!connector_.ready(peer_, lane)) return false;
  }
  cuts_ = connector_.sockets(peer_, lane);
  for (int number = 0; number < cuts_; number++) {
    sockets_.push_back(std::make_unique<Socket>());
    sockets_.back()->number = number;
  }
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
  const bool bare = cutting_ == outgoing_.size();
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
    header.payload = crc32c(message.data.sub(header.offset, length));
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

// ------------------------------------------------------------------------------ receiving

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

// ------------------------------------------------------------------------------ cut connections

// Takes the first connections, and those that replace cut ones.
void TcpChannel::adopt_connections() {
  for (Connection& fresh : connector_.take(peer_, poller_.lane())) {
    Socket& socket = *sockets_[static_cast<size_t>(fresh.socket)];
    if (!socket.sock) cuts_--;
    socket.sock = std::move(fresh.sock);
    socket.generation = fresh.generation;
    socket.reopening = false;
    socket.ready = {};
    socket.wake_bytes = 1;
    socket.greeting = fresh.generation > 0;
    socket.greeted = 0;
    poller_.watch(socket.sock.get(), socket.ready);
    if (!socket.greeting) {
      // This is a first connection. If there was one before, the peer has not seen that it was
      // made: it was cut with the end of our handshake, and with all that we had written.
      if (!socket.out.may_resume_at(0))
        throw_damaged("it makes a first connection again, although it has received data on one");
      socket.out.resume_at(0);
      continue;
    }
    Resume ours;
    ours.generation = socket.generation;
    ours.received = socket.arrived;
    seal(ours);
    // This is the first write on the connection, so there is room.
    const ssize_t n = socket.sock.send(&ours, sizeof ours);
    socket.acknowledged = socket.arrived;
    if (n != sizeof ours) cut(socket, "it was cut as soon as it was made");
  }
}

// Reads how far the peer's stream has come, and resumes from there. Returns true when it has.
bool TcpChannel::greet(Socket& socket) {
  auto* bytes = reinterpret_cast<uint8_t*>(&socket.theirs);
  while (socket.ready.readable && socket.greeted < sizeof socket.theirs) {
    const ssize_t n =
        socket.sock.receive(bytes + socket.greeted, sizeof socket.theirs - socket.greeted);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      socket.ready.readable = socket.ready.ends;
      return false;
    }
    if (n <= 0) {
      cut(socket, n < 0 ? error_text(errno) : "it closed the connection");
      return false;
    }
    socket.greeted += static_cast<size_t>(n);
  }
  if (socket.greeted < sizeof socket.theirs) return false;
  if (!is_sound(socket.theirs) || socket.theirs.generation != socket.generation ||
      !socket.out.may_resume_at(socket.theirs.received)) {
    throw_damaged("after a connection was cut it asks for bytes that are no longer kept");
  }
  socket.out.resume_at(socket.theirs.received);
  acknowledge(socket, socket.theirs.received);
  socket.greeting = false;
  return true;
}

// The streams stay as they are: a new connection resumes them, if the peer lives.
void TcpChannel::cut(Socket& socket, const std::string& how) {
  socket.sock.reset();
  socket.ready = {false, false, false};
  socket.greeting = false;
  socket.cut_by = how;
  cuts_++;
  if (poller_.control().gone(peer_)) return;
  socket.reopening = true;
  connector_.request({peer_, poller_.lane(), socket.number, socket.generation});
}

// Copies unacknowledged bytes when there is nothing else to do, so that callers get their memory
// back. A peer that is gone has received all that it wanted, as far as it was written. While some
// bytes are not written, this waits for a standstill, since to copy all of a stream costs: a
// written message must not wait for the next one, which its receiver may not want before.
bool TcpChannel::release_buffers() {
  if (outgoing_.empty()) return false;
  const bool gone = cuts_ > 0 && poller_.control().gone(peer_);
  const bool all_written =
      cutting_ == outgoing_.size() &&
      std::all_of(sockets_.begin(), sockets_.end(), [gone](const auto& socket) {
        const bool written = socket->out.all_written() && socket->unproven == 0;
        return written && !socket->greeting && (socket->sock || gone);
      });
  if (!all_written && (cuts_ > 0 || !stalled())) return false;
  const uint64_t before = sent_;
  for (auto& socket : sockets_) keep(*socket);
  return sent_ > before;
}

bool TcpChannel::stalled() {
  const auto now = std::chrono::steady_clock::now();
  if (stalled_since_ == std::chrono::steady_clock::time_point()) stalled_since_ = now;
  return now - stalled_since_ > kStallLimit;
}

// Throws if the peer is gone and a receive can never complete. A rank that has left or died sends
// nothing more, and receives nothing. A connection that has come to a message for which there is no
// receive yet brings nothing of earlier messages.
void TcpChannel::check_for_loss() const {
  if (connector_.has_errors()) connector_.connection_error(peer_, poller_.lane(), false);
  if (!poller_.control().gone(peer_)) return;
  const bool over = std::all_of(sockets_.begin(), sockets_.end(), [this](const auto& socket) {
    return !socket->sock || (socket->reading && !has_receive(socket->in.message));
  });
  for (const auto& socket : sockets_) {
    if (socket->sock) continue;
    const bool torn = socket->reading || socket->unproved || socket->staged() > 0 ||
                      socket->unproven != 0 || !socket->out.all_written();
    if (torn || over) throw_lost(socket->cut_by);
  }
}

bool TcpChannel::interrupted() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  if (poller_.control().gone(peer_)) return false;
  return std::any_of(sockets_.begin(), sockets_.end(), [](const auto& socket) {
    if (socket->out.all_acknowledged()) return false;
    const bool repeats = socket->generation > 0 && !socket->out.all_written();
    return !socket->sock || socket->greeting || repeats ||
           tcp::unacknowledged(socket->sock.get()) > 0;
  });
}

bool TcpChannel::ended() {
  poller_.poll();
  poller_.ring();  // we may have taken the event that the lane's thread sleeps for
  return std::all_of(sockets_.begin(), sockets_.end(), [](const auto& socket) {
    return socket->sock ? socket->ready.ends : !socket->reopening;
  });
}

void TcpChannel::reconnect() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  resume(true);
}

void TcpChannel::resume(bool pushes) {
  if (sockets_.empty() && !(connector_.ready(peer_, poller_.lane()) && connected())) return;
  poller_.poll();
  if (connector_.fresh(peer_, poller_.lane())) adopt_connections();
  poller_.control().poll();
  const bool gone = poller_.control().gone(peer_);
  for (auto& socket : sockets_) {
    // What a peer has sent before it left can still be read.
    if (socket->sock && socket->ready.ends && !socket->out.all_acknowledged() && !gone) {
      cut(*socket, "it closed the connection");
    }
    if ((!socket->greeting || greet(*socket)) && pushes) push(*socket);
  }
}

// Of several paths, leaves those that are silent while another is not: the connector makes the
// connection again by another one, and what was in flight is repeated there.
void TcpChannel::look_at_paths() {
  const auto now = std::chrono::steady_clock::now();
  if (connector_.directory().paths() == 1 || now - paths_seen_ < kPathInterval) return;
  paths_seen_ = now;
  const auto is_cut = [](const auto& socket) {
    return !socket->sock || is_silent(socket->sock.get());
  };
  if (std::all_of(sockets_.begin(), sockets_.end(), is_cut)) return;
  for (auto& socket : sockets_) {
    if (!socket->sock) continue;
    if (is_silent(socket->sock.get())) {
      cut(*socket, "its path carries nothing");
    } else {
      limit_unsent(socket->sock.get());
    }
  }
}

bool TcpChannel::on_tick() {
  look_at_paths();
  const auto must_repeat = [this] {
    return std::any_of(sockets_.begin(), sockets_.end(), [this](const auto& socket) {
      return socket->sock && !socket->out.all_acknowledged() &&
             (socket->greeting || (outgoing_.empty() && !socket->out.all_written()));
    });
  };
  if (!connector_.fresh(peer_, poller_.lane()) && !(tick_again_ && must_repeat())) return false;
  // A caller that has something to send drives the lane itself; or it has failed, and the message
  // is no longer in its memory.
  resume(outgoing_.empty());
  poller_.ring();  // we may have taken the event that the lane's thread sleeps for
  tick_again_ = must_repeat();
  return tick_again_;
}

// ------------------------------------------------------------------------------ the end

void TcpChannel::finish() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  for (auto& socket : sockets_) {
    if (socket->sock) ::shutdown(socket->sock.get(), SHUT_WR);
  }
}

LinkUse TcpChannel::use() const {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  LinkUse sum;
  for (const auto& socket : sockets_) {
    const LinkUse use = link_use(socket->sock.get());
    sum.bytes += use.bytes;
    sum.busy_us += use.busy_us;
  }
  // The sockets are busy at the same time, each with its part.
  if (!sockets_.empty()) sum.busy_us /= sockets_.size();
  return sum;
}

size_t TcpChannel::unacknowledged() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  size_t bytes = 0;
  for (const auto& socket : sockets_) bytes += tcp::unacknowledged(socket->sock.get());
  return bytes;
}

void TcpChannel::throw_damaged(const std::string& how) const {
  const OpTag tag = !incoming_.empty()   ? incoming_.front().tag
                    : !outgoing_.empty() ? outgoing_.front().tag
                                         : OpTag();
  throw Error("tcp: rank " + std::to_string(poller_.rank()) + " received damaged data from rank " +
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

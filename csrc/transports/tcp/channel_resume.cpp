// Resuming a channel after a connection was cut, and detecting that it cannot be resumed.
#include <algorithm>
#include <cerrno>

#include "transports/tcp/channel_socket.h"
#include "transports/tcp/net/buffers.h"

namespace pycomm::tcp {

// If a stream on a slow link pauses for this long, a copy costs nothing beside the link.
constexpr auto kStallLimit = std::chrono::milliseconds(20);
// The interval at which a channel looks at its paths.
constexpr auto kPathInterval = std::chrono::milliseconds(100);

// Takes the first connections, and those that replace cut ones.
void TcpChannel::adopt_connections() {
  for (Connection& fresh : connector_.take(peer_, poller_.lane())) {
    Socket& socket = *sockets_[static_cast<size_t>(fresh.socket)];
    if (!socket.sock) cuts_--;
    socket.sock = std::move(fresh.sock);
    socket.generation = fresh.generation;
    socket.limit = 0;
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
  connector_.reopen({peer_, poller_.lane(), socket.number, socket.generation});
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

void TcpChannel::reconnect() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  resume(true);
}

void TcpChannel::resume(bool pushes) {
  if (sockets_.empty() && !(connector_.ready(peer_, poller_.lane()) && connected())) return;
  poller_.poll();
  if (connector_.fresh(peer_, poller_.lane())) adopt_connections();
  for (auto& socket : sockets_) {
    if (socket->sock && socket->ready.ends && !socket->out.all_acknowledged()) {
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

}  // namespace pycomm::tcp

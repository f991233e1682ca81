// How a channel goes on after a connection was cut, and when it must not wait for one.
#include <algorithm>
#include <cerrno>

#include "transports/tcp_channel_socket.h"

namespace pycomm::tcp {

// Where a stream on a slow link pauses for so long, a copy costs nothing beside the link.
constexpr auto kStandstill = std::chrono::milliseconds(20);

// Takes the first connections, and those that stand for ones that were cut.
void TcpChannel::adopt_connections() {
  for (Connection& fresh : connector_.take(peer_, poller_.lane())) {
    Socket& socket = *sockets_[static_cast<size_t>(fresh.socket)];
    if (!socket.wire) cuts_--;
    socket.wire = std::move(fresh.wire);
    socket.generation = fresh.generation;
    socket.ready = {};
    socket.wake_bytes = 1;
    socket.greeting = fresh.generation > 0;
    socket.greeted = 0;
    poller_.watch(socket.wire.get(), socket.ready);
    if (!socket.greeting) continue;
    Resume ours;
    ours.generation = socket.generation;
    ours.received = socket.arrived;
    seal(ours);
    // It is the first on this connection, so there is room.
    const ssize_t n = socket.wire.send(&ours, sizeof ours);
    socket.acknowledged = socket.arrived;
    if (n != sizeof ours) cut(socket, "it was cut as soon as it stood");
  }
}

// The peer says how far it is, and we go on from there. True when it has.
bool TcpChannel::greet(Socket& socket) {
  auto* bytes = reinterpret_cast<uint8_t*>(&socket.theirs);
  while (socket.ready.readable && socket.greeted < sizeof socket.theirs) {
    const ssize_t n =
        socket.wire.receive(bytes + socket.greeted, sizeof socket.theirs - socket.greeted);
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
    throw_damaged("after a connection was cut it wants to go on where we cannot");
  }
  socket.out.resume_at(socket.theirs.received);
  acknowledge(socket, socket.theirs.received);
  socket.greeting = false;
  return true;
}

// The streams stay as they are: a new connection goes on with them, if the peer lives.
void TcpChannel::cut(Socket& socket, const std::string& how) {
  socket.wire.reset();
  socket.ready = {false, false, false};
  socket.greeting = false;
  socket.cut_by = how;
  cuts_++;
  if (poller_.control().gone(peer_)) return;
  connector_.reopen({peer_, poller_.lane(), socket.number, socket.generation});
}

// With nothing else to do, takes what the peer has not acknowledged into copies: then callers have
// their memory back. A peer that is gone has what it wanted, as far as it was written. While some
// is not written only after a while, since to copy all of a stream costs: a message that is written
// must not wait for the next one, which its receiver may not want before.
bool TcpChannel::let_go() {
  if (outgoing_.empty()) return false;
  const bool gone = cuts_ > 0 && poller_.control().gone(peer_);
  const bool all_written =
      cutting_ == outgoing_.size() &&
      std::all_of(sockets_.begin(), sockets_.end(), [gone](const auto& socket) {
        const bool written = socket->out.all_written() && socket->unproven == 0;
        return written && !socket->greeting && (socket->wire || gone);
      });
  if (!all_written && (cuts_ > 0 || !stands_still())) return false;
  const uint64_t before = sent_;
  for (auto& socket : sockets_) keep(*socket);
  return sent_ > before;
}

bool TcpChannel::stands_still() {
  const auto now = std::chrono::steady_clock::now();
  if (still_since_ == std::chrono::steady_clock::time_point()) still_since_ = now;
  return now - still_since_ > kStandstill;
}

// A rank that has left or died sends nothing more, and takes nothing. A connection that has come to
// a message for which there is no receive yet brings nothing of those before.
void TcpChannel::look_for_loss() const {
  if (connector_.troubled()) connector_.obstacle(peer_, poller_.lane(), false);
  if (!poller_.control().gone(peer_)) return;
  const bool over = std::all_of(sockets_.begin(), sockets_.end(), [this](const auto& socket) {
    return !socket->wire || (socket->reading && !has_receive(socket->in.message));
  });
  for (const auto& socket : sockets_) {
    if (socket->wire) continue;
    const bool torn = socket->reading || socket->unproved || socket->staged() > 0 ||
                      socket->unproven != 0 || !socket->out.all_written();
    if (torn || over) throw_lost(socket->cut_by);
  }
}

bool TcpChannel::wounded() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  if (poller_.control().gone(peer_)) return false;
  return std::any_of(sockets_.begin(), sockets_.end(), [](const auto& socket) {
    if (socket->out.all_acknowledged()) return false;
    const bool repeats = socket->generation > 0 && !socket->out.all_written();
    return !socket->wire || socket->greeting || repeats ||
           tcp::unacknowledged(socket->wire.get()) > 0;
  });
}

void TcpChannel::heal() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  mend(true);
}

void TcpChannel::mend(bool pushes) {
  if (sockets_.empty() && !(connector_.ready(peer_, poller_.lane()) && connected())) return;
  poller_.poll();
  if (connector_.fresh(peer_, poller_.lane())) adopt_connections();
  for (auto& socket : sockets_) {
    if (socket->wire && socket->ready.ends && !socket->out.all_acknowledged()) {
      cut(*socket, "it closed the connection");
    }
    if ((!socket->greeting || greet(*socket)) && pushes) push(*socket);
  }
}

bool TcpChannel::tend() {
  const auto restless = [this] {
    return std::any_of(sockets_.begin(), sockets_.end(), [this](const auto& socket) {
      return socket->wire && !socket->out.all_acknowledged() &&
             (socket->greeting || (outgoing_.empty() && !socket->out.all_written()));
    });
  };
  if (!connector_.fresh(peer_, poller_.lane()) && !(tended_ && restless())) return false;
  // Who has something to send drives the lane; or has failed, and it is no longer in its memory.
  mend(outgoing_.empty());
  poller_.ring();  // we may have taken the event for which the lane's thread sleeps
  tended_ = restless();
  return tended_;
}

}  // namespace pycomm::tcp

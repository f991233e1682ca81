// Connection attempts: those that peers make to us, and our own, which are repeated until they are
// accepted.
#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transports/tcp/connect/connector.h"
#include "transports/tcp/connect/control.h"

namespace pycomm::tcp {

// The time that the network may take for a connection before we try another interface.
constexpr auto kConnectLimit = std::chrono::seconds(3);
// The same where another path may serve, and the pause between two attempts to return to the own.
constexpr auto kPathLimit = Milliseconds(500);
constexpr int kPathRoundTrips = 4;
constexpr auto kReturnPause = Milliseconds(2000);
constexpr auto kLastRetry = Milliseconds(1000);
// A peer that refuses every attempt for this long counts as dead without another proof; meanwhile
// we try at least once per kRefusedPause.
constexpr auto kRefusedFor = std::chrono::seconds(3);
constexpr auto kRefusedPause = Milliseconds(100);
// No more sockets than this are connected early, since most ranks of a large group never talk to
// each other.
constexpr size_t kEarlySockets = 128;
// The time for which a rank that must connect may have no free descriptor.
constexpr auto kStarvedFor = std::chrono::seconds(10);

// Returns the number that a Hello for the lane has.
uint16_t Connector::sockets_of(const Link& link, uint16_t lane) const {
  const bool carries_data = lane < kLanes && !link.lane_states[lane].socket_states.empty();
  return static_cast<uint16_t>(carries_data ? link.lane_states[lane].socket_states.size()
                                            : directory_.sockets_at(Milliseconds(0)));
}

void Connector::set_sockets(LaneState& lane_state, int count) {
  lane_state.socket_states.resize(static_cast<size_t>(count));
  lane_state.missing = count;
}

Hello Connector::hello_to(const Link& link, uint16_t lane) const {
  Hello hello;
  hello.size = static_cast<uint32_t>(size_);
  hello.rank = static_cast<uint32_t>(rank_);
  hello.target = static_cast<uint32_t>(link.peer.rank);
  hello.sockets = sockets_of(link, lane);
  hello.lane = lane;
  hello.tls = directory_.options.tls;
  return hello;
}

void Connector::connect(Link& link, uint16_t lane, Milliseconds round_trip) {
  int count = 1;
  if (lane != kControl) {
    count = directory_.sockets_at(round_trip);
    set_sockets(link.lane_states[lane], count);
  }
  Hello hello = hello_to(link, lane);
  for (int i = 0; i < count; i++) {
    hello.socket = static_cast<uint16_t>(i);
    connect(link, hello, Clock::now());
  }
}

void Connector::connect(Link& link, const Hello& hello, Clock::time_point when) {
  outgoing_.emplace_back();
  outgoing_.back().link = &link;
  outgoing_.back().hello = hello;
  outgoing_.back().attempt = hello.socket;
  outgoing_.back().wake = when;
}

// A socket whose own path did not connect runs on another one until it does.
void Connector::return_later(Link& link, const Hello& hello) {
  Hello next = hello_to(link, hello.lane);
  next.socket = hello.socket;
  next.generation = hello.generation + 1;
  connect(link, next, Clock::now() + kReturnPause);
  outgoing_.back().returns = true;
}

// True for a return whose socket has been connected again since, or is about to be.
bool Connector::is_outdated(const Outgoing& out) const {
  const SocketState& state = state_of({out.link->peer.rank, out.hello.lane, out.hello.socket, 0});
  return state.broken || state.generation + 1 != out.hello.generation;
}

// Where there is another path, a silent one is left soon: a packet that was lost is a second late.
std::chrono::milliseconds Connector::connect_limit() const {
  if (directory_.paths() == 1) return kConnectLimit;
  const auto far = control_ == nullptr ? Milliseconds(0) : control_->round_trip();
  return kPathLimit + kPathRoundTrips * far;
}

void Connector::serve(Outgoing& out) {
  const Peer& peer = out.link->peer;
  int error = 0;
  if (out.hello.lane == kCallBack && !out.link->control_state.broken) {
    out.over = true;
    return;
  }
  if (out.returns && is_outdated(out)) {
    out.over = true;
    return;
  }
  if (!out.fd) {
    if (Clock::now() < out.wake) return;
    if (out.returns && control_ == nullptr) {  // the set-up takes only first connections
      out.wake = Clock::now() + kReturnPause;
      return;
    }
    // The sockets are spread over the interfaces: our i-th to the peer's i-th. The route decides by
    // which interface we leave, unless the user has named one.
    const size_t pair = out.attempt % directory_.paths();
    // Connections leave by the interfaces that the user has named.
    const bool bound = !directory_.options.interface.empty();
    const Address* from = bound ? &directory_.interfaces[pair].address : nullptr;
    out.fd = connect_to(peer.addresses[pair], from, error);
    out.wake = Clock::now() + connect_limit();
    if (lacks_descriptor(error) && !out.returns) {
      const bool may_wait = control_ != nullptr || out.hello.lane != kControl;
      starve(out.starved_since, error, may_wait);
    } else {
      out.starved_since = {};
    }
    if (error != 0) retry(out, error);
    return;
  }
  if (!out.ready) {
    if (Clock::now() >= out.wake) retry(out, ETIMEDOUT);
    return;
  }
  if (!out.greeting) {
    error = pending_error(out.fd.get());
    if (error != 0) return retry(out, error);
    if (control_ == nullptr && out.hello.lane == kControl && peer.door.empty() &&
        round_trip(out.fd.get()) >= kFarAway) {
      connect_early(*out.link, round_trip(out.fd.get()));
    }
    out.greeting.emplace(Handshake(peer.secret, group_, out.hello));
    out.wake = Clock::time_point::max();
  }
  switch (out.greeting->advance(out.fd.get(), error)) {
    case Greeting::Progress::waits:
      return;
    case Greeting::Progress::closed:
      return retry(out, error);
    case Greeting::Progress::refused:
      // The peer is in the group, so another process has its port now, or answers in its place for
      // a while.
      if (control_ != nullptr) return retry(out, ECONNREFUSED);
      throw Error("tcp: rank " + std::to_string(rank_) + " cannot join: " + name_of(*out.link) +
                  ": " + out.greeting->problem());
    case Greeting::Progress::done:
      if (out.hello.lane == kCallBack) return retry(out, 0);  // until the peer's connection arrives
      join(*out.link, out.hello, out.greeting->sock(std::move(out.fd)));
      out.over = true;
      if (out.attempt % directory_.paths() != out.hello.socket % directory_.paths()) {
        return_later(*out.link, out.hello);
      }
  }
}

// Begins to connect the sockets of collectives with a far peer while the set-up goes on, so that
// the first operation need not wait for three round trips.
void Connector::connect_early(Link& link, Milliseconds round_trip) {
  LaneState& lane_state = link.lane_states[static_cast<size_t>(Lane::collective)];
  const auto sockets = static_cast<size_t>(directory_.sockets_at(round_trip));
  if (lane_state.wanted || links_.size() * sockets > kEarlySockets) return;
  lane_state.wanted = true;
  connect(link, static_cast<uint16_t>(Lane::collective), round_trip);
}

// A full queue, a router that wakes up, or a flooded listener passes. So does a firewall that
// refuses in the peer's name while its rules are loaded, and a proxy that restarts: a closed port
// proves no death where we do not see the peer's process.
void Connector::retry(Outgoing& out, int error) {
  const bool refused = error == ECONNREFUSED;
  const std::string how = out.greeting && (refused || error == EPROTO)
                              ? (refused ? "" : "TLS: ") + out.greeting->problem()
                          : error == 0 ? "it closed the connection during the handshake"
                                       : error_text(error);
  last_error_ = name_of(*out.link) + ": " + how;
  const auto now = Clock::now();
  if (!refused) {
    out.refused_since = {};
  } else if (out.refused_since == Clock::time_point()) {
    out.refused_since = now;
  }
  out.fd.reset();
  out.ready = false;
  out.greeting.reset();
  if (out.returns) {  // meanwhile the other path serves
    out.wake = now + kReturnPause;
    return;
  }
  const Peer& peer = out.link->peer;
  const bool gone = peer.has_died() || (control_ != nullptr && control_->gone(peer.rank));
  if (refused && (gone || now - out.refused_since >= kRefusedFor)) return give_up(out);
  out.attempt++;
  out.wake = now + (refused ? std::min(out.pause, kRefusedPause) : out.pause);
  out.pause = std::min(out.pause * 2, kLastRetry);
}

// Other files get closed in time; if none is, the process has a leak, and nothing else would end
// the wait before its deadline.
void Connector::starve(Clock::time_point& since, int error, bool may_wait) const {
  const auto now = Clock::now();
  if (since == Clock::time_point()) since = now;
  if (may_wait && now - since < kStarvedFor) return;
  throw Error("tcp: rank " + std::to_string(rank_) +
              " can make no connection: " + no_descriptor_text(error));
}

// The peer's listener is gone, and so is its process.
void Connector::give_up(Outgoing& out) {
  out.link->connection_error = last_error_ + "; it died or gave up, or a firewall stands between";
  out.over = true;
  has_errors_ = true;
  if (control_ != nullptr) control_->refused(out.link->peer.rank);
}

// The time limit for a connection's greeting, which is a few small messages. Late peers are not
// hurt: they try again.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
// The limit of connections that have not authenticated; a further one pushes out the oldest.
constexpr size_t kMaxPending = 512;
// Without a free descriptor there is no use in polling listeners.
constexpr auto kAcceptBackoff = Milliseconds(50);

void Connector::accept_all(const Fd& listener) {
  while (Fd fd = accept_from(listener.get())) {
    if (pending_connections_.size() == kMaxPending) pending_connections_.pop_front();
    pending_connections_.push_back(
        {std::move(fd),
         Greeting(Handshake(directory_.secret, group_, rank_, size_, directory_.options.sockets,
                            directory_.options.tls)),
         Clock::now() + kGreetingLimit});
  }
  const int error = errno;
  if (!lacks_descriptor(error)) {
    starved_since_ = {};
    return;
  }
  if (!pending_connections_.empty()) {  // drop these rather than fail
    pending_connections_.clear();
  } else if (control_ == nullptr || (expects() && has_caller(listener.get()))) {
    starve(starved_since_, error, control_ != nullptr);
  }
  accept_backoff_until_ = Clock::now() + kAcceptBackoff;
}

// True if peers must connect to us: otherwise a connection that we cannot accept does no harm.
bool Connector::expects() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& link) {
    const auto broken = [](const SocketState& state) { return state.broken; };
    return link->control_state.broken ||
           std::any_of(link->lane_states.begin(), link->lane_states.end(),
                       [&](const LaneState& lane_state) {
                         return (lane_state.wanted && !lane_state.complete()) ||
                                std::any_of(lane_state.socket_states.begin(),
                                            lane_state.socket_states.end(), broken);
                       });
  });
}

void Connector::serve(PendingConnection& pending) {
  int error = 0;
  const auto progress = pending.greeting.advance(pending.fd.get(), error);
  if (progress == Greeting::Progress::waits) return;
  if (progress == Greeting::Progress::done) {
    const Hello& hello = pending.greeting.hello();
    for (const auto& link : links_) {
      if (link->peer.rank != static_cast<int>(hello.rank)) continue;
      join(*link, hello, pending.greeting.sock(std::move(pending.fd)));
      break;
    }
  } else {
    note_refusal(pending, progress == Greeting::Progress::refused);
  }
  pending.fd.reset();
}

// Notes a refusal for the error text of a set-up that fails. A refused peer tells more than one
// that closed its connection.
void Connector::note_refusal(const PendingConnection& pending, bool refused) {
  refused_++;
  if (!refused && !last_refused_.empty()) return;
  const Address from = Address::remote(pending.fd.get());
  last_refused_ = (from.size() > 0 ? from.text() : "a stranger") + ": " +
                  (refused ? pending.greeting.problem() : "it went away during the handshake");
}

}  // namespace pycomm::tcp

// Connector: one loop over the listeners, our outgoing connections and the pending connections of
// strangers that may turn out to be peers.
#include "transports/tcp/connect/connector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "core/notice.h"
#include "core/thread.h"
#include "transports/tcp/connect/control.h"
#include "transports/tcp/net/tuning.h"

namespace pycomm::tcp {
namespace {

// The interval at which channels that nobody drives repeat what must be sent again.
constexpr auto kTickInterval = Milliseconds(2);
// The interval at which the connections of several paths are looked at.
constexpr auto kPathInterval = Milliseconds(200);
// The pause between two attempts to send an abort.
constexpr auto kAbortResendPause = Milliseconds(20);
// The interrupt check runs at least this often during the set-up, however much there is to do.
constexpr auto kInterruptCheckInterval = Milliseconds(500);
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
// The time limit for a connection's greeting, which is a few small messages, at both of its ends.
// Late peers are not hurt: they are called again.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
// The limit of connections that have not authenticated; a further one pushes out the oldest.
constexpr size_t kMaxPending = 512;
// Without a free descriptor there is no use in polling listeners.
constexpr auto kAcceptBackoff = Milliseconds(50);
// A connection that has lasted this long is made again at once; after shorter ones we wait, longer
// each time.
constexpr auto kLasting = std::chrono::seconds(1);
constexpr auto kFirstPause = Milliseconds(20);
constexpr auto kLastPause = Milliseconds(100);

}  // namespace

Connector::Connector(const Rendezvous& rendezvous, PeerDirectory directory)
    : group_(rendezvous.group),
      rank_(rendezvous.rank),
      size_(rendezvous.size),
      deadline_(rendezvous.deadline),
      poll_interval_(rendezvous.poll_interval()),
      store_round_trip_(std::chrono::duration_cast<Milliseconds>(rendezvous.store->round_trip())),
      directory_(std::move(directory)),
      label_(group_ + (directory_.session.empty() ? "" : "/" + directory_.session)),
      process_(::getpid()),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      by_rank_(static_cast<size_t>(size_)) {
  if (!wake_) throw_errno("tcp: cannot make an eventfd");
  for (const Peer& peer : directory_.peers) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->peer = peer;
    by_rank_[static_cast<size_t>(peer.rank)] = links_.back().get();
  }
}

Connector::~Connector() { stop(); }

bool Connector::forked() const { return process_ != ::getpid(); }

// ------------------------------------------------------------------------------ the set-up

void Connector::connect_all(Control& control, const std::function<void()>& interrupt_check) {
  const auto all_connected = [this] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const auto& link) { return static_cast<bool>(link->control); });
  };
  for (const auto& link : links_) {
    if (link->peer.rank > rank_) continue;
    connect(*link, kControl, Milliseconds(0));
    if (store_round_trip_ >= kFarAway && !link->peer.near) {
      connect_early(*link, store_round_trip_);
    }
  }
  auto next_interrupt_check = Deadline::after(kInterruptCheckInterval);
  while (!all_connected()) {
    const bool moved = wait();
    if (deadline_.expired()) throw_incomplete();
    // An interrupt check may take a round trip to a remote store, and handshakes wait for it.
    if (!moved || next_interrupt_check.expired()) {
      interrupt_check();
      next_interrupt_check = Deadline::after(kInterruptCheckInterval);
    }
    turn();
    for (const auto& link : links_) {
      if (link->connection_error.empty()) continue;
      throw_error(lost(
          link->peer.rank,
          "is gone, and rank " + std::to_string(rank_) + " cannot join: " + link->connection_error,
          link->peer.addresses[0].text()));
    }
  }
  for (const auto& link : links_) {
    control.add(link->peer.rank, link->peer.addresses[0], std::move(link->control));
  }
  control_ = &control;
}

void Connector::throw_incomplete() const {
  std::string missing;
  for (const auto& link : links_) {
    if (!link->control) missing += (missing.empty() ? "" : ", ") + name_of(*link);
  }
  std::string text = "rank " + std::to_string(rank_) + " has no connection with " + missing;
  if (!last_error_.empty()) text += "; last error: " + last_error_;
  if (refused_ > 0) {
    text +=
        "; refused " + std::to_string(refused_) + " connections, the last from " + last_refused_;
  }
  throw Timeout("tcp: group \"" + group_ + "\" did not come together within " +
                std::to_string(deadline_.limit().count()) + " ms: " + text);
}

std::string Connector::name_of(const Link& link) const {
  return "rank " + std::to_string(link.peer.rank) + " (" + link.peer.addresses[0].text() + ")";
}

// ------------------------------------------------------------------------------ the thread

void Connector::start(std::function<void(int lane)> on_ready, std::function<bool()> on_tick) {
  on_ready_ = std::move(on_ready);
  on_tick_ = std::move(on_tick);
  for (int lane = 0; lane < kLanes; lane++) {  // peers may have been quick
    for (const auto& link : links_) {
      if (link->lane_states[static_cast<size_t>(lane)].ready) on_ready_(lane);
    }
  }
  thread_ = std::make_unique<std::thread>(
      start_thread("tcp: rank " + std::to_string(rank_), [this] { run(); }));
}

void Connector::stop() {
  if (!thread_) return;
  if (forked()) {  // the handle may be that of a thread that the child has started
    static_cast<void>(thread_.release());
    return;
  }
  stop_ = true;
  wake();
  thread_->join();
  thread_.reset();
}

void Connector::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Connector::run() {
  while (!stop_) {
    wait();
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
    control_->poll();
    if (control_->aborted()) return report_abort();
    try {
      process_requests();
      turn();
      if (directory_.paths() > 1) control_->leave_silent_paths();
      tick_again_ = on_tick_();
    } catch (const std::exception&) {
      std::lock_guard<std::mutex> lock(mutex_);
      broken_ = std::current_exception();
      has_errors_ = true;
      return;
    }
  }
}

// A peer that reads nothing at the moment receives the abort later.
void Connector::report_abort() {
  for (auto pause = Milliseconds(1); !stop_ && control_->unsent();
       pause = std::min(2 * pause, kAbortResendPause)) {
    std::this_thread::sleep_for(pause);
    control_->poll();
  }
}

void Connector::request(const WantedConnection& wanted) {
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    requests_.push_back(wanted);
  }
  wake();
}

void Connector::process_requests() {
  std::vector<WantedConnection> requests;
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    requests.swap(requests_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const WantedConnection& wanted : requests) {
    wanted.socket < 0 ? open(wanted) : reopen(wanted);
  }
}

void Connector::open(const WantedConnection& wanted) {
  Link& link = this->link(wanted.rank);
  LaneState& lane_state = link.lane_states[static_cast<size_t>(wanted.lane)];
  if (lane_state.wanted || lane_state.complete()) return;
  lane_state.wanted = true;
  if (wanted.rank > rank_) return control_->ask_to_connect(wanted);
  connect(link, static_cast<uint16_t>(wanted.lane), link.round_trip);
}

bool Connector::ready(int rank, int lane) const {
  return link(rank).lane_states[static_cast<size_t>(lane)].ready.load(std::memory_order_acquire);
}

bool Connector::fresh(int rank, int lane) const {
  return link(rank).lane_states[static_cast<size_t>(lane)].has_fresh.load(
      std::memory_order_acquire);
}

int Connector::sockets(int rank, int lane) const {
  return static_cast<int>(link(rank).lane_states[static_cast<size_t>(lane)].socket_states.size());
}

std::pair<int, int> Connector::sockets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int least = kMostSockets, most = 0;
  for (const auto& link : links_) {
    const auto& states = link->lane_states[static_cast<size_t>(Lane::collective)].socket_states;
    const int count =
        states.empty() ? directory_.sockets_at(link->round_trip) : static_cast<int>(states.size());
    least = std::min(least, count);
    most = std::max(most, count);
  }
  return {least, most};
}

std::string Connector::congestion_control() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return congestion_control_;
}

std::vector<Connection> Connector::take(int rank, int lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  LaneState& lane_state = link(rank).lane_states[static_cast<size_t>(lane)];
  lane_state.has_fresh.store(false, std::memory_order_relaxed);
  return std::exchange(lane_state.fresh, {});
}

// The mutex is ours only between two rounds of the thread: connections that a peer has used, and so
// has seen authenticated, are then either ready or among ours.
std::string Connector::connection_error(int rank, int lane, bool gone) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  const Link& wanted = link(rank);
  const LaneState& lane_state = wanted.lane_states[static_cast<size_t>(lane)];
  if (lane_state.complete()) return "";
  if (!wanted.connection_error.empty() || !gone) return wanted.connection_error;
  const bool connecting = rank < rank_ && lane_state.wanted;
  return connecting ? "" : "it closed the connection";
}

// ------------------------------------------------------------------------------ the loop

bool Connector::wait() {
  std::vector<pollfd> polls = {{wake_.get(), POLLIN, 0}};
  auto wake = Clock::time_point::max();
  const bool deaf = Clock::now() < accept_backoff_until_;
  for (const Fd& listener : directory_.own.sockets) {
    polls.push_back({deaf ? -1 : listener.get(), POLLIN, 0});
  }
  if (control_ != nullptr) {
    polls.push_back({control_->wait_fd(), POLLIN, 0});
  } else {
    wake = Clock::now() + std::min(deadline_.left(), poll_interval_);
  }
  if (deaf) wake = std::min(wake, accept_backoff_until_);
  if (tick_again_) wake = std::min(wake, Clock::now() + kTickInterval);
  if (directory_.paths() > 1) wake = std::min(wake, Clock::now() + kPathInterval);
  const size_t first = polls.size();
  for (const Outgoing& out : outgoing_) {
    wake = std::min(wake, out.wake);
    if (out.fd) {
      const short events = out.greeting ? out.greeting->events() : short{POLLOUT};
      polls.push_back({out.fd.get(), events, 0});
    }
  }
  for (const PendingConnection& pending : pending_connections_) {
    wake = std::min(wake, pending.wake);
    polls.push_back({pending.fd.get(), pending.greeting.events(), 0});
  }
  int limit = -1;
  if (wake != Clock::time_point::max()) {
    const auto pause = std::chrono::duration_cast<Milliseconds>(wake - Clock::now()).count();
    limit = static_cast<int>(std::clamp<int64_t>(pause, -1, 60000)) + 1;
  }
  const bool moved = ::poll(polls.data(), polls.size(), limit) > 0;
  auto result = polls.begin() + static_cast<ptrdiff_t>(first);
  for (Outgoing& out : outgoing_) out.ready = out.fd && (result++)->revents != 0;
  for (PendingConnection& pending : pending_connections_) pending.ready = (result++)->revents != 0;
  return moved;
}

void Connector::turn() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Outgoing& out : outgoing_) serve(out);
  outgoing_.remove_if([](const Outgoing& out) { return out.over; });
  for (PendingConnection& pending : pending_connections_) {
    if (pending.ready) serve(pending);
  }
  const auto now = Clock::now();
  pending_connections_.remove_if(
      [&](const PendingConnection& pending) { return !pending.fd || now >= pending.wake; });
  for (const Fd& listener : directory_.own.sockets) accept_all(listener);
}

void Connector::join(Link& link, const Hello& hello, SecureSocket sock) {
  if (hello.lane == kCallBack) {  // from a lower rank
    request({link.peer.rank, kControl, 0, hello.generation});
    return;
  }
  if (hello.lane != kControl) {
    LaneState& lane_state = link.lane_states[hello.lane];
    if (lane_state.socket_states.empty()) set_sockets(lane_state, hello.sockets);
    if (lane_state.socket_states.size() != hello.sockets) return;
  }
  SocketState& state = state_of({link.peer.rank, hello.lane, hello.socket, 0});
  // An equal generation replaces ours if the peer did not see that our connection was made.
  if (state.established && hello.generation < state.generation) return;
  const bool first = !state.established;
  state.established = true;
  state.broken = false;
  state.generation = hello.generation;
  state.since = Clock::now();
  choose_congestion_control(sock.get(), directory_.options.congestion);
  if (hello.lane == kControl) {
    congestion_control_ = tcp::congestion_control(sock.get());
    link.round_trip = std::max(link.round_trip, tcp::round_trip(sock.get()));
    if (control_ == nullptr) {
      link.control = std::move(sock);
    } else {
      control_->renew(link.peer.rank, hello.generation, std::move(sock));
      ask_again(link);
    }
    return;
  }
  choose_buffers(sock.get(), directory_.paths() > 1);
  LaneState& lane_state = link.lane_states[hello.lane];
  lane_state.fresh.push_back({hello.socket, hello.generation, std::move(sock)});
  if (first) lane_state.missing--;
  if (lane_state.missing > 0) return;
  lane_state.has_fresh.store(true, std::memory_order_release);
  lane_state.ready.store(true, std::memory_order_release);
  if (on_ready_) on_ready_(hello.lane);
}

// ------------------------------------------------------------------------------ our attempts to
// connect

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
  hello.tls = directory_.encrypts ? 1 : 0;
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
  out.over = out.hello.lane == kCallBack ? !out.link->control_state.broken
                                         : out.returns && is_outdated(out);
  if (out.over) return;
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
    const Address* from = bound ? &directory_.own.interfaces[pair].address : nullptr;
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
    if (control_ == nullptr && out.hello.lane == kControl && !peer.near &&
        round_trip(out.fd.get()) >= kFarAway) {
      connect_early(*out.link, round_trip(out.fd.get()));
    }
    out.greeting.emplace(Handshake(peer.secret, label_, out.hello));
    out.wake = Clock::now() + kGreetingLimit;  // what has taken the call may lead to nobody
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
      // Nobody has proven anything yet: a stranger who answers in its place for a while must not
      // end the set-up.
      return retry(out, EACCES);
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
  const bool answered = out.greeting && (refused || error == EPROTO || error == EACCES);
  const std::string how = answered     ? (error == EPROTO ? "TLS: " : "") + out.greeting->problem()
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
  const bool gone = peer.process.died() || (control_ != nullptr && control_->gone(peer.rank));
  if (refused && (gone || now - out.refused_since >= kRefusedFor)) return give_up(out, how);
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
              " can make no connection: " + error_text(error));
}

// The peer's listener is gone, and so is its process.
void Connector::give_up(Outgoing& out, const std::string& how) {
  out.link->connection_error = how + "; it died or gave up, or a firewall stands between";
  out.over = true;
  has_errors_ = true;
  if (control_ != nullptr) control_->refused(out.link->peer.rank);
}

// ------------------------------------------------------------------------------ connections of
// others

void Connector::accept_all(const Fd& listener) {
  while (Fd fd = accept_from(listener.get())) {
    if (pending_connections_.size() == kMaxPending) pending_connections_.pop_front();
    pending_connections_.push_back(
        {std::move(fd),
         Greeting(Handshake(directory_.own.secret, label_, rank_, size_, directory_.options.sockets,
                            directory_.encrypts)),
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

// ------------------------------------------------------------------------------ cut connections

Connector::SocketState& Connector::state_of(const WantedConnection& wanted) const {
  Link& link = this->link(wanted.rank);
  if (wanted.lane == kControl) return link.control_state;
  return link.lane_states[static_cast<size_t>(wanted.lane)]
      .socket_states[static_cast<size_t>(wanted.socket)];
}

// Both ends may have noticed the cut, or one alone.
void Connector::reopen(const WantedConnection& broken) {
  if (broken.lane != kControl && broken.socket >= sockets(broken.rank, broken.lane)) return;
  SocketState& state = state_of(broken);
  if (!state.established || state.broken || state.generation != broken.generation) return;
  state.broken = true;
  Link& wanted = link(broken.rank);
  const auto lane = static_cast<uint16_t>(broken.lane);
  const auto now = Clock::now();
  state.pause = now - state.since >= kLasting
                    ? Milliseconds(0)
                    : std::clamp(2 * state.pause, kFirstPause, kLastPause);
  if (broken.rank < rank_) {
    Hello hello = hello_to(wanted, lane);
    hello.socket = static_cast<uint16_t>(broken.socket);
    hello.generation = broken.generation + 1;
    connect(wanted, hello, now + state.pause);
  } else if (lane == kControl) {
    Hello hello = hello_to(wanted, kCallBack);
    hello.generation = broken.generation;
    connect(wanted, hello, now);
  } else {
    control_->ask_to_connect(broken);
  }
}

// Requests that were sent while the control connection was cut are lost.
void Connector::ask_again(Link& link) {
  if (link.peer.rank < rank_) return;
  for (int lane = 0; lane < kLanes; lane++) {
    LaneState& lane_state = link.lane_states[static_cast<size_t>(lane)];
    if (lane_state.wanted && !lane_state.complete())
      control_->ask_to_connect({link.peer.rank, lane});
    for (size_t socket = 0; socket < lane_state.socket_states.size(); socket++) {
      const SocketState& state = lane_state.socket_states[socket];
      if (!state.broken) continue;
      control_->ask_to_connect({link.peer.rank, lane, static_cast<int>(socket), state.generation});
    }
  }
}

}  // namespace pycomm::tcp

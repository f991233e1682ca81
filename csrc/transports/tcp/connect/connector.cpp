// Connector: one loop over the listeners, our outgoing connections and the pending connections of
// strangers that may turn out to be peers (connect/establish.cpp).
#include "transports/tcp/connect/connector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transports/tcp/connect/control.h"
#include "transports/tcp/net/buffers.h"
#include "transports/tcp/net/congestion.h"

namespace pycomm::tcp {

// The interval at which channels that nobody drives repeat what must be sent again.
constexpr auto kTickInterval = Milliseconds(2);
// The interval at which the connections of several paths are looked at.
constexpr auto kPathInterval = Milliseconds(200);
// The pause between two attempts to send an abort.
constexpr auto kAbortResendPause = Milliseconds(20);
// The interrupt check runs at least this often during the set-up, however much there is to do.
constexpr auto kInterruptCheckInterval = Milliseconds(500);

Connector::Connector(const Rendezvous& rendezvous, PeerDirectory directory)
    : group_(rendezvous.group),
      rank_(rendezvous.rank),
      size_(rendezvous.size),
      deadline_(rendezvous.deadline),
      poll_interval_(rendezvous.poll_interval()),
      store_round_trip_(std::chrono::duration_cast<Milliseconds>(rendezvous.store->round_trip())),
      directory_(std::move(directory)),
      process_(::getpid()),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      by_rank_(static_cast<size_t>(size_)) {
  if (!wake_) throw Error("tcp: cannot make an eventfd: " + error_text(errno));
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
    if (store_round_trip_ >= kFarAway && link->peer.door.empty()) {
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
      throw PeerLost(link->peer.rank, "tcp: rank " + std::to_string(rank_) +
                                          " cannot join: " + link->connection_error);
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
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

void Connector::stop() {
  if (!thread_) return;
  if (forked()) {  // the handle may be that of a thread that the child has started
    static_cast<void>(thread_.release());
    return;
  }
  stop_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  thread_->join();
  thread_.reset();
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
      reconnect();
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

void Connector::open(int rank, int lane) {
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    pending_requests_.emplace_back(rank, lane);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Connector::process_requests() {
  std::vector<std::pair<int, int>> requests;
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    requests.swap(pending_requests_);
  }
  for (const auto& [rank, lane] : requests) {
    Link& wanted = link(rank);
    bool ask = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      LaneState& lane_state = wanted.lane_states[static_cast<size_t>(lane)];
      if (lane_state.wanted || lane_state.complete()) continue;
      lane_state.wanted = true;
      ask = rank > rank_;
      if (!ask) connect(wanted, static_cast<uint16_t>(lane), wanted.round_trip);
    }
    if (ask) control_->ask_to_connect(rank, lane);
  }
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
  for (const Fd& listener : directory_.listeners) {
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
  for (const Fd& listener : directory_.listeners) accept_all(listener);
}

void Connector::join(Link& link, const Hello& hello, SecureSocket sock) {
  if (hello.lane == kCallBack) {  // from a lower rank
    reopen({link.peer.rank, kControl, 0, hello.generation});
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

}  // namespace pycomm::tcp

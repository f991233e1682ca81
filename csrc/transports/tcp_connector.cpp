// One loop over the listeners, our connections (tcp_dial.cpp) and those of strangers that may turn
// out to be peers (tcp_accept.cpp).
#include "transports/tcp_connector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transports/tcp_connector_parts.h"
#include "transports/tcp_control.h"

namespace pycomm::tcp {

// Channels that nobody drives and that have words to repeat.
constexpr auto kTendEvery = Milliseconds(2);

Connector::Connector(const Rendezvous& meeting, Mesh mesh)
    : group_(meeting.group),
      rank_(meeting.rank),
      size_(meeting.size),
      deadline_(meeting.deadline),
      patience_(meeting.patience()),
      mesh_(std::move(mesh)),
      process_(::getpid()),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      by_rank_(static_cast<size_t>(size_)) {
  if (!wake_) throw Error("tcp: cannot make an eventfd: " + error_text(errno));
  for (const Peer& peer : mesh_.peers) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->peer = peer;
    by_rank_[static_cast<size_t>(peer.rank)] = links_.back().get();
    for (Way& way : links_.back()->ways) {
      way.places.resize(static_cast<size_t>(mesh_.sockets));
      way.missing = mesh_.sockets;
    }
  }
}

Connector::~Connector() { stop(); }

bool Connector::forked() const { return process_ != ::getpid(); }

// ------------------------------------------------------------------------------ the set-up

void Connector::connect_all(Control& control, const std::function<void()>& look_out) {
  const auto all_stand = [this] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const auto& link) { return static_cast<bool>(link->control); });
  };
  for (const auto& link : links_) {
    if (link->peer.rank < rank_) connect(*link, kControl);
  }
  while (!all_stand()) {
    wait();
    if (deadline_.expired()) throw_incomplete();
    look_out();
    turn();
    for (const auto& link : links_) {
      if (link->obstacle.empty()) continue;
      throw PeerLost(link->peer.rank,
                     "tcp: rank " + std::to_string(rank_) + " cannot join: " + link->obstacle);
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

void Connector::start(std::function<void(int lane)> on_ready, std::function<bool()> tend) {
  on_ready_ = std::move(on_ready);
  tend_ = std::move(tend);
  for (int lane = 0; lane < kLanes; lane++) {  // peers may have been quick
    for (const auto& link : links_) {
      if (link->ways[static_cast<size_t>(lane)].ready) on_ready_(lane);
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
    if (control_->aborted()) return;
    try {
      grant_wishes();
      mend();
      turn();
      tend_again_ = tend_();
    } catch (const std::exception&) {
      std::lock_guard<std::mutex> lock(mutex_);
      broken_ = std::current_exception();
      troubled_ = true;
      return;
    }
  }
}

void Connector::open(int rank, int lane) {
  {
    std::lock_guard<std::mutex> lock(wishes_mutex_);
    wishes_.emplace_back(rank, lane);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Connector::grant_wishes() {
  std::vector<std::pair<int, int>> wishes;
  {
    std::lock_guard<std::mutex> lock(wishes_mutex_);
    wishes.swap(wishes_);
  }
  for (const auto& [rank, lane] : wishes) {
    Link& wanted = link(rank);
    bool ask = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Way& way = wanted.ways[static_cast<size_t>(lane)];
      if (way.wanted || way.missing == 0) continue;
      way.wanted = true;
      ask = rank > rank_;
      if (!ask) connect(wanted, static_cast<uint16_t>(lane));
    }
    if (ask) control_->ask_to_connect(rank, lane);
  }
}

bool Connector::ready(int rank, int lane) const {
  return link(rank).ways[static_cast<size_t>(lane)].ready.load(std::memory_order_acquire);
}

bool Connector::fresh(int rank, int lane) const {
  return link(rank).ways[static_cast<size_t>(lane)].has_fresh.load(std::memory_order_acquire);
}

std::vector<Connection> Connector::take(int rank, int lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  Way& way = link(rank).ways[static_cast<size_t>(lane)];
  way.has_fresh.store(false, std::memory_order_relaxed);
  return std::exchange(way.fresh, {});
}

// A turn of the thread is over when we have the mutex: connections that a peer has used, and so has
// seen authenticated, are either ready or among ours.
std::string Connector::obstacle(int rank, int lane, bool gone) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  const Link& wanted = link(rank);
  const Way& way = wanted.ways[static_cast<size_t>(lane)];
  if (way.missing == 0) return "";
  if (!wanted.obstacle.empty() || !gone) return wanted.obstacle;
  const bool connecting = rank < rank_ && way.wanted;
  return connecting ? "" : "it closed the connection";
}

// ------------------------------------------------------------------------------ the loop

void Connector::wait() {
  std::vector<pollfd> polls = {{wake_.get(), POLLIN, 0}};
  auto wake = Clock::time_point::max();
  const bool deaf = Clock::now() < deaf_until_;
  for (const Fd& listener : mesh_.listeners) {
    polls.push_back({deaf ? -1 : listener.get(), POLLIN, 0});
  }
  if (control_ != nullptr) {
    polls.push_back({control_->wait_fd(), POLLIN, 0});
  } else {
    wake = Clock::now() + std::min(deadline_.left(), patience_);
  }
  if (deaf) wake = std::min(wake, deaf_until_);
  if (tend_again_) wake = std::min(wake, Clock::now() + kTendEvery);
  const size_t first = polls.size();
  for (const Outgoing& out : outgoing_) {
    wake = std::min(wake, out.wake);
    if (out.fd) {
      const short events = out.greeting ? out.greeting->events() : short{POLLOUT};
      polls.push_back({out.fd.get(), events, 0});
    }
  }
  for (const Stranger& stranger : strangers_) {
    wake = std::min(wake, stranger.wake);
    polls.push_back({stranger.fd.get(), stranger.greeting.events(), 0});
  }
  int limit = -1;
  if (wake != Clock::time_point::max()) {
    const auto pause = std::chrono::duration_cast<Milliseconds>(wake - Clock::now()).count();
    limit = static_cast<int>(std::clamp<int64_t>(pause, -1, 60000)) + 1;
  }
  ::poll(polls.data(), polls.size(), limit);
  auto result = polls.begin() + static_cast<ptrdiff_t>(first);
  for (Outgoing& out : outgoing_) out.ready = out.fd && (result++)->revents != 0;
  for (Stranger& stranger : strangers_) stranger.ready = (result++)->revents != 0;
}

void Connector::turn() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Outgoing& out : outgoing_) serve(out);
  outgoing_.remove_if([](const Outgoing& out) { return out.over; });
  for (Stranger& stranger : strangers_) {
    if (stranger.ready) serve(stranger);
  }
  const auto now = Clock::now();
  strangers_.remove_if(
      [&](const Stranger& stranger) { return !stranger.fd || now >= stranger.wake; });
  for (const Fd& listener : mesh_.listeners) accept_all(listener);
}

void Connector::join(Link& link, const Hello& hello, Wire wire) {
  if (hello.lane == kCallBack) {  // from a lower rank
    reopen({link.peer.rank, kControl, 0, hello.generation});
    return;
  }
  Place& place = this->place({link.peer.rank, hello.lane, hello.socket, 0});
  // An equal one replaces ours if its end did not see that ours stood.
  if (place.stood && hello.generation < place.generation) return;
  const bool first = !place.stood;
  place.stood = true;
  place.broken = false;
  place.generation = hello.generation;
  place.since = Clock::now();
  choose_congestion_control(wire.get());
  if (hello.lane == kControl) {
    congestion_control_ = tcp::congestion_control(wire.get());
    if (control_ == nullptr) {
      link.control = std::move(wire);
    } else {
      control_->renew(link.peer.rank, hello.generation, std::move(wire));
      ask_again(link);
    }
    return;
  }
  choose_send_buffer(wire.get());
  Way& way = link.ways[hello.lane];
  way.fresh.push_back({hello.socket, hello.generation, std::move(wire)});
  if (first) way.missing--;
  if (way.missing > 0) return;
  way.has_fresh.store(true, std::memory_order_release);
  way.ready.store(true, std::memory_order_release);
  if (on_ready_) on_ready_(hello.lane);
}

}  // namespace pycomm::tcp

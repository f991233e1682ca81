// One loop over the listeners, our connections and those of strangers that may turn out to be
// peers.
#include "transports/tcp_connector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transports/tcp_control.h"

namespace pycomm::tcp {
namespace {

// How long a connection may take for its handshake, which is four small messages. Late peers are
// not hurt: they try again.
constexpr auto kHandshakeLimit = std::chrono::seconds(10);
// How long the network may take for a connection before we try another way.
constexpr auto kConnectLimit = std::chrono::seconds(3);
// Connections that have not authenticated; more push out the oldest.
constexpr size_t kMaxStrangers = 512;
// Without a free descriptor there is no use in looking at listeners.
constexpr auto kDeaf = Milliseconds(50);
// Channels that nobody drives and that have words to repeat.
constexpr auto kTendEvery = Milliseconds(2);
constexpr auto kFirstRetry = Milliseconds(20);
constexpr auto kLastRetry = Milliseconds(1000);

enum class Progress : uint8_t { waits, closed, over };

// Moves a handshake as far as it goes now. `error` gets the reason of `closed`, 0 for an orderly
// end.
Progress advance(int fd, Handshake& handshake, int& error) {
  for (;;) {
    while (handshake.to_send().size > 0) {
      const auto out = handshake.to_send();
      const ssize_t n = ::send(fd, out.data, out.size, MSG_NOSIGNAL);
      if (n < 0) {
        error = errno;
        return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
      }
      handshake.sent(static_cast<size_t>(n));
    }
    if (handshake.state() != Handshake::State::running) return Progress::over;
    const auto in = handshake.wanted();
    const ssize_t n = ::recv(fd, in.data, in.size, 0);
    if (n <= 0) {
      error = n < 0 ? errno : 0;
      return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
    }
    handshake.received(static_cast<size_t>(n));
  }
}

short events_of(const Handshake& handshake) {
  return handshake.to_send().size > 0 ? POLLOUT : POLLIN;
}

}  // namespace

struct Connector::Outgoing {
  Link* link;
  Hello hello;
  Fd fd;
  std::optional<Handshake> handshake;     // none while the connection is being made
  Clock::time_point wake = Clock::now();  // when to try again, or to give this attempt up
  Milliseconds pause = kFirstRetry;
  size_t way = 0;  // which of our interfaces to which of the peer's
  bool ready = false;
  bool over = false;
};

struct Connector::Stranger {
  Fd fd;
  Handshake handshake;
  Clock::time_point wake;  // when to give it up
  bool ready = false;
};

Connector::Connector(const Rendezvous& meeting, Mesh mesh)
    : group_(meeting.group),
      rank_(meeting.rank),
      size_(meeting.size),
      deadline_(meeting.deadline),
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

void Connector::connect_all(Control& control) {
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
  std::string text = "no connection with " + missing;
  if (!last_error_.empty()) text += "; last error: " + last_error_;
  if (refused_ > 0) {
    text +=
        "; refused " + std::to_string(refused_) + " connections, the last from " + last_refused_;
  }
  throw Timeout("tcp: rank " + std::to_string(rank_) + ": group \"" + group_ +
                "\" did not come together within " + std::to_string(deadline_.limit().count()) +
                " ms: " + text);
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
    wake = Clock::now() + deadline_.left();
  }
  if (deaf) wake = std::min(wake, deaf_until_);
  if (tend_again_) wake = std::min(wake, Clock::now() + kTendEvery);
  const size_t first = polls.size();
  for (const Outgoing& out : outgoing_) {
    wake = std::min(wake, out.wake);
    if (out.fd) {
      const short events = out.handshake ? events_of(*out.handshake) : short{POLLOUT};
      polls.push_back({out.fd.get(), events, 0});
    }
  }
  for (const Stranger& stranger : strangers_) {
    wake = std::min(wake, stranger.wake);
    polls.push_back({stranger.fd.get(), events_of(stranger.handshake), 0});
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

void Connector::join(Link& link, const Hello& hello, Fd fd) {
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
  choose_congestion_control(fd.get());
  if (hello.lane == kControl) {
    congestion_control_ = tcp::congestion_control(fd.get());
    if (control_ == nullptr) {
      link.control = std::move(fd);
    } else {
      control_->renew(link.peer.rank, hello.generation, std::move(fd));
      ask_again(link);
    }
    return;
  }
  choose_send_buffer(fd.get());
  Way& way = link.ways[hello.lane];
  way.fresh.push_back({hello.socket, hello.generation, std::move(fd)});
  if (first) way.missing--;
  if (way.missing > 0) return;
  way.has_fresh.store(true, std::memory_order_release);
  way.ready.store(true, std::memory_order_release);
  if (on_ready_) on_ready_(hello.lane);
}

// ------------------------------------------------------------------------------ who comes

void Connector::accept_all(const Fd& listener) {
  while (Fd fd = accept_from(listener.get())) {
    if (strangers_.size() == kMaxStrangers) strangers_.pop_front();
    strangers_.push_back({std::move(fd),
                          Handshake(mesh_.secret, group_, rank_, size_, mesh_.sockets),
                          Clock::now() + kHandshakeLimit});
  }
  if (errno != EMFILE && errno != ENFILE) return;
  if (!strangers_.empty()) {  // rather these than us
    strangers_.clear();
  } else if (control_ == nullptr) {
    throw Error("tcp: rank " + std::to_string(rank_) + " cannot accept connections: " +
                error_text(errno) + "; raise the limit of open files (ulimit -n)");
  }
  deaf_until_ = Clock::now() + kDeaf;
}

void Connector::serve(Stranger& stranger) {
  int error = 0;
  const Progress progress = advance(stranger.fd.get(), stranger.handshake, error);
  if (progress == Progress::waits) return;
  if (stranger.handshake.state() == Handshake::State::done) {
    const Hello& hello = stranger.handshake.hello();
    for (const auto& link : links_) {
      if (link->peer.rank != static_cast<int>(hello.rank)) continue;
      join(*link, hello, std::move(stranger.fd));
      break;
    }
  } else {
    note_refusal(stranger, progress == Progress::over);
  }
  stranger.fd.reset();
}

// For the error text of a set-up that fails. Who was refused tells more than who went away.
void Connector::note_refusal(const Stranger& stranger, bool over) {
  refused_++;
  if (!over && !last_refused_.empty()) return;
  const Address from = Address::remote(stranger.fd.get());
  last_refused_ = (from.size() > 0 ? from.text() : "a stranger") + ": " +
                  (over ? stranger.handshake.problem() : "it went away during the handshake");
}

// ------------------------------------------------------------------------------ whom we call

Hello Connector::hello_to(const Link& link, uint16_t lane) const {
  Hello hello;
  hello.size = static_cast<uint32_t>(size_);
  hello.rank = static_cast<uint32_t>(rank_);
  hello.target = static_cast<uint32_t>(link.peer.rank);
  hello.sockets = static_cast<uint16_t>(mesh_.sockets);
  hello.lane = lane;
  return hello;
}

void Connector::connect(Link& link, uint16_t lane) {
  Hello hello = hello_to(link, lane);
  const int count = lane == kControl ? 1 : mesh_.sockets;
  for (int i = 0; i < count; i++) {
    hello.socket = static_cast<uint16_t>(i);
    connect(link, hello, Clock::now());
  }
}

void Connector::connect(Link& link, const Hello& hello, Clock::time_point when) {
  outgoing_.emplace_back();
  outgoing_.back().link = &link;
  outgoing_.back().hello = hello;
  outgoing_.back().way = hello.socket;
  outgoing_.back().wake = when;
}

void Connector::serve(Outgoing& out) {
  const Peer& peer = out.link->peer;
  int error = 0;
  if (out.hello.lane == kCallBack && !out.link->control_place.broken) {
    out.over = true;
    return;
  }
  if (!out.fd) {
    if (Clock::now() < out.wake) return;
    // The sockets go round the interfaces: our i-th to the peer's i-th. The route decides by which
    // interface we leave, unless the user has.
    const size_t pairs = std::min(mesh_.interfaces.size(), peer.addresses.size());
    const size_t pair = out.way % pairs;
    const Address* from = mesh_.bound ? &mesh_.interfaces[pair].address : nullptr;
    out.fd = connect_to(peer.addresses[pair], from, error);
    out.wake = Clock::now() + kConnectLimit;
    if (error != 0) retry(out, error);
    return;
  }
  if (!out.ready) {
    if (Clock::now() >= out.wake) retry(out, ETIMEDOUT);
    return;
  }
  if (!out.handshake) {
    error = pending_error(out.fd.get());
    if (error != 0) return retry(out, error);
    out.handshake.emplace(peer.secret, group_, out.hello);
    out.wake = Clock::time_point::max();
  }
  switch (advance(out.fd.get(), *out.handshake, error)) {
    case Progress::waits:
      return;
    case Progress::closed:
      return retry(out, error);
    case Progress::over:
      if (out.handshake->state() == Handshake::State::refused) {
        // Of one that has been in the group before: somebody else has its port now.
        if (out.hello.generation > 0 || out.hello.lane == kCallBack) return give_up(out);
        throw Error("tcp: rank " + std::to_string(rank_) + " cannot join: " + name_of(*out.link) +
                    ": " + out.handshake->problem());
      }
      if (out.hello.lane == kCallBack) {
        return retry(out, 0);  // until its call comes
      }
      join(*out.link, out.hello, std::move(out.fd));
      out.over = true;
  }
}

// A full queue, a router that wakes up, a listener that was flooded: such things pass. A closed
// port does not, since the address was published after the port was open.
void Connector::retry(Outgoing& out, int error) {
  last_error_ = name_of(*out.link) + ": " +
                (error == 0 ? "it closed the connection during the handshake" : error_text(error));
  if (error == ECONNREFUSED) give_up(out);
  out.fd.reset();
  out.ready = false;
  out.handshake.reset();
  out.way++;
  out.wake = Clock::now() + out.pause;
  out.pause = std::min(out.pause * 2, kLastRetry);
}

// Its listener is gone, and so is its process.
void Connector::give_up(Outgoing& out) {
  out.link->obstacle = last_error_ + "; it died or gave up, or a firewall stands between";
  out.over = true;
  troubled_ = true;
  if (control_ != nullptr) control_->refused(out.link->peer.rank);
}

}  // namespace pycomm::tcp

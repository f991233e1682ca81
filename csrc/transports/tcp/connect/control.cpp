// Control connections: messages of a fixed size, so that one never waits for the rest of another.
#include "transports/tcp/connect/control.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "core/crc32c.h"
#include "core/error.h"
#include "transports/tcp/net/tuning.h"
#include "transports/transport.h"

namespace pycomm::tcp {

using Clock = std::chrono::steady_clock;

/// A message, in its wire format.
struct Control::Message {
  static constexpr uint32_t kMagic = 0x4e435950;  // "PYCN"
  enum class Kind : uint32_t {
    abort = 1,
    close = 2,
    connect = 3,
    ask = 4,
    rank_state = 5,
    heard = 6
  };

  explicit Message(Kind kind = Kind::abort) : kind(kind) {}
  /// True for messages that may be dropped: a rank that needs the answer asks again.
  bool is_small_talk() const { return kind == Kind::ask || kind == Kind::rank_state; }

  uint32_t magic = kMagic;
  Kind kind;
  uint32_t lane = 0;  // these are those of a WantedConnection
  int32_t socket = -1;
  uint32_t generation = 0;
  uint8_t body[Notice::kBytes] = {};  // an encoded Notice, or the bytes of a RankState
  uint32_t checksum = 0;

  uint32_t compute() const {
    return crc32c({reinterpret_cast<const uint8_t*>(this), offsetof(Message, checksum)});
  }
};

struct Control::Peer {
  int rank;
  Address address;
  SecureSocket sock;
  uint32_t generation = 0;
  std::atomic<State> state{State::here};
  Clock::time_point cut_at{}, died_at{};  // when its connection ended, when its port refused us
  RankState rank_state;                   // its last answer
  bool answered = false;                  // since we last asked
  bool told = false;                      // our close went by this connection
  bool heard = false;                     // it has acknowledged our close
  std::atomic<bool> owed{false};          // we have not acknowledged its close yet
  Message in;
  size_t in_done = 0;
  std::string out;  // not yet taken by the connection: the rest of a message, then whole ones
  size_t out_done = 0;
  bool full = false;  // we wait for room

  size_t unsent() const { return out.size() - out_done; }
};

Control::Control(const SharedRankState* rank_state)
    : rank_state_(rank_state),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC)) {
  if (!epoll_ || !wake_) throw_errno("tcp: cannot make an epoll");
  epoll_event event = {};
  event.events = EPOLLIN;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
}

Control::~Control() = default;

void Control::add(int rank, const Address& address, SecureSocket sock) {
  auto peer = std::make_unique<Peer>();
  peer->rank = rank;
  peer->address = address;
  peer->sock = std::move(sock);
  peer->out.reserve(16 * sizeof(Message));  // an abort must need no memory
  watch(*peer);
  peers_.push_back(std::move(peer));
}

void Control::watch(Peer& peer) {
  round_trip_ = std::max(round_trip_.load(), tcp::round_trip(peer.sock.get()).count());
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.ptr = &peer;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer.sock.get(), &event) != 0) {
    throw_errno("tcp: cannot watch a connection");
  }
}

void Control::renew(int rank, uint32_t generation, SecureSocket sock) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = *find(rank);
  if (peer.state != State::here && peer.state != State::cut) return;
  peer.sock = std::move(sock);
  peer.generation = generation;
  peer.in_done = 0;
  peer.out.clear();
  peer.out_done = 0;
  peer.full = peer.told = false;
  watch(peer);
  peer.state.store(State::here, std::memory_order_release);
}

void Control::refused(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = *find(rank);
  take_in(peer);
  if (peer.state != State::here && peer.state != State::cut) return;
  peer.died_at = Clock::now();
  if (peer.state == State::here) peer.cut_at = peer.died_at;
  peer.state.store(State::died, std::memory_order_release);
}

Control::Peer* Control::find(int rank) const {
  return std::find_if(peers_.begin(), peers_.end(),
                      [&](const auto& peer) { return peer->rank == rank; })
      ->get();
}

bool Control::gone(int rank) const {
  const State state = find(rank)->state.load(std::memory_order_acquire);
  return state == State::left || state == State::died;
}

bool Control::cut_off() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer->state.load(std::memory_order_acquire) == State::cut;
  });
}

void Control::poll() {
  epoll_event events[16];
  const int count = ::epoll_wait(epoll_.get(), events, 16, 0);
  if (count <= 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < count; i++) {
    if (events[i].data.ptr == nullptr) continue;
    Peer& peer = *static_cast<Peer*>(events[i].data.ptr);
    if ((events[i].events & EPOLLOUT) != 0) push(peer);
    if ((events[i].events & ~uint32_t{EPOLLOUT}) != 0) take_in(peer);
  }
}

// The caller holds the mutex.
void Control::take_in(Peer& peer) {
  while (peer.sock) {
    const ssize_t n = peer.sock.receive(reinterpret_cast<uint8_t*>(&peer.in) + peer.in_done,
                                        sizeof peer.in - peer.in_done);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
      peer.in_done += static_cast<size_t>(n);
      if (peer.in_done < sizeof peer.in) continue;
      peer.in_done = 0;
      if (peer.in.magic == Message::kMagic && peer.in.checksum == peer.in.compute()) {
        on_message(peer, peer.in);
        continue;
      }
    }
    // The connection has ended, or brought something that no peer of ours would send.
    lose(peer);
  }
}

// The caller holds the mutex.
void Control::lose(Peer& peer) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.sock.get(), nullptr);
  peer.sock.reset();
  peer.owed = false;  // it waits no longer
  if (peer.state != State::here) return;
  peer.cut_at = Clock::now();
  peer.state.store(State::cut, std::memory_order_release);
  if (on_wanted_) on_wanted_({peer.rank, kControl, 0, peer.generation});
}

void Control::leave_silent_paths() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->sock && peer->state == State::here && is_silent(peer->sock.get())) lose(*peer);
  }
}

void Control::on_message(Peer& peer, const Message& message) {
  switch (message.kind) {
    case Message::Kind::close:
      peer.state.store(State::left, std::memory_order_release);
      peer.owed = true;
      if (on_close_) on_close_();
      return;
    case Message::Kind::heard:
      peer.heard = true;
      return;
    case Message::Kind::connect:
      if (message.lane >= kLanes || !on_wanted_) return;
      return on_wanted_(
          {peer.rank, static_cast<int>(message.lane), message.socket, message.generation});
    case Message::Kind::abort:
      return end_group(message);
    case Message::Kind::ask:
      if (rank_state_) {
        Message answer(Message::Kind::rank_state);
        const RankState rank_state = rank_state_->load();
        std::memcpy(answer.body, &rank_state, sizeof rank_state);
        tell(peer, answer);
      }
      return;
    case Message::Kind::rank_state:
      std::memcpy(static_cast<void*>(&peer.rank_state), message.body, sizeof peer.rank_state);
      peer.answered = true;
      return;
  }
}

// The caller holds the mutex.
void Control::end_group(const Message& message) noexcept {
  if (aborted()) return;
  std::memcpy(abort_notice_, message.body, sizeof abort_notice_);
  aborted_.store(true, std::memory_order_release);
  tell_all(message);
  wake_all();
}

// The wake-up is never reset: from now on every wait on wait_fd() returns at once.
void Control::wake_all() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

// Nothing blocks here: what the connection does not take now follows when it has room. A peer that
// does not read does not get more and more requests.
void Control::tell(Peer& peer, Message message) noexcept {
  if (!peer.sock || (peer.unsent() > 0 && message.is_small_talk())) return;
  message.checksum = message.compute();
  try {
    peer.out.append(reinterpret_cast<const char*>(&message), sizeof message);
  } catch (const std::bad_alloc&) {
    return;
  }
  push(peer);
}

// The caller holds the mutex. The connection gets the same bytes again until it has taken them, and
// only then others, as an encrypted one requires.
void Control::push(Peer& peer) noexcept {
  while (peer.sock && peer.unsent() > 0) {
    const ssize_t n = peer.sock.send(peer.out.data() + peer.out_done, peer.unsent());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) break;  // it is cut, which the receiving side notices
    if (n < 0) {
      wait_for_room(peer, true);
      return;
    }
    sent_bytes_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    peer.out_done += static_cast<size_t>(n);
  }
  peer.out.clear();
  peer.out_done = 0;
  wait_for_room(peer, false);
}

void Control::wait_for_room(Peer& peer, bool wait) noexcept {
  if (peer.full == wait || !peer.sock) return;
  epoll_event event = {};
  event.events = wait ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = &peer;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.sock.get(), &event);
  peer.full = wait;
}

void Control::tell_all(const Message& message) noexcept {
  for (const auto& peer : peers_) tell(*peer, message);
}

void Control::ask_to_connect(const WantedConnection& wanted) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Message message(Message::Kind::connect);
  message.lane = static_cast<uint32_t>(wanted.lane);
  message.socket = wanted.socket;
  message.generation = wanted.generation;
  tell(*find(wanted.rank), message);
}

void Control::abort(const Notice& notice) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Message message;
  notice.encode(message.body, sizeof message.body);
  end_group(message);
}

void Control::ask() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) peer->answered = false;
  tell_all(Message(Message::Kind::ask));
}

PeerStatus Control::look(int rank) {
  poll();
  std::lock_guard<std::mutex> lock(mutex_);
  const Peer& peer = *find(rank);
  PeerStatus status;
  status.rank_state = peer.rank_state;
  if (peer.state == State::left) status.liveness = PeerStatus::Liveness::left;
  if (peer.state == State::died) status.liveness = PeerStatus::Liveness::died;
  if (peer.state == State::here && peer.answered) status.liveness = PeerStatus::Liveness::here;
  return status;
}

bool Control::send_close() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  bool any = false;
  for (const auto& peer : peers_) {
    if (!peer->sock || std::exchange(peer->told, true)) continue;
    tell(*peer, Message(Message::Kind::close));
    any = true;
  }
  return any;
}

bool Control::owes_answer(int rank) const { return find(rank)->owed; }

void Control::answer_close(int rank) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  find(rank)->owed = false;
  tell(*find(rank), Message(Message::Kind::heard));
}

size_t Control::unacknowledged(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Peer& peer = *find(rank);
  return peer.sock ? peer.unsent() + tcp::unacknowledged(peer.sock.get()) : 0;
}

std::chrono::microseconds Control::round_trip(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return least_round_trip(find(rank)->sock.get());
}

bool Control::unsent() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return peer->sock && peer->unsent() > 0; });
}

bool Control::close_acknowledged(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return find(rank)->heard;
}

// These functions decide which rank is named when one is gone.

// A dead peer is no error yet for ranks that may be finishing without it; and an abort notice
// travels on another connection than the data whose end we saw. Both may take a retransmitted
// packet, so the grace is longer by some round trips, and, where the peers are far away and packets
// may be lost, by the least time after which Linux sends one again.
constexpr auto kDeathGrace = std::chrono::milliseconds(50);
constexpr auto kNoticeGrace = std::chrono::milliseconds(50);
constexpr int kRoundTrips = 2;
constexpr Milliseconds kRetransmitted(200);

Milliseconds Control::late_packet() const {
  const Milliseconds far = round_trip();
  return far.count() > 0 ? kRoundTrips * far + kRetransmitted : Milliseconds(0);
}

void Control::check() {
  poll();
  if (aborted()) throw_aborted();
  const bool deaths = std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer->state.load(std::memory_order_acquire) == State::died;
  });
  if (!deaths) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const Peer* const first = first_death();  // null: its close has come since
  if (first == nullptr || Clock::now() - first->died_at < kDeathGrace + late_packet()) return;
  lock.unlock();
  throw_died(*first, "it closed its connections without a word");
}

// Returns the peer that died first, or null. A rank that gives up because of a death while it is
// still joining the group looks dead, too; the first death is the cause. The caller holds the
// mutex.
Control::Peer* Control::first_death() const {
  Peer* first = nullptr;
  for (const auto& peer : peers_) {
    if (peer->state != State::died) continue;
    if (first == nullptr || peer->cut_at < first->cut_at) first = peer.get();
  }
  return first;
}

void Control::throw_aborted() const {
  throw Aborted(Notice::decode({abort_notice_, sizeof abort_notice_}));
}

void Control::throw_died(const Peer& peer, const std::string& how) const {
  throw_error(lost(peer.rank, "died: " + how, peer.address.text()));
}

void Control::throw_lost(int rank, const std::string& what) {
  Peer& peer = *find(rank);
  const auto end = Clock::now() + kNoticeGrace + late_packet();
  for (;;) {
    pollfd wait = {-1, POLLIN, 0};
    poll();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (aborted()) throw_aborted();
      // The peer may have gone because of another one whose death is not certain yet.
      const bool known = gone(rank) && !cut_off();
      if (known || Clock::now() >= end) break;
      wait.fd = peer.sock.get();  // may be none
    }
    ::poll(&wait, 1, 5);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const Peer* const dead = first_death();
  const bool left = peer.state == State::left;
  lock.unlock();
  if (dead != nullptr && dead != &peer) {
    throw_died(*dead, "and rank " + std::to_string(rank) + (left ? " left" : " is gone, too"));
  }
  if (!left) throw_died(peer, what);
  throw_error(lost(rank, "has left the group: " + what, peer.address.text()));
}

}  // namespace pycomm::tcp

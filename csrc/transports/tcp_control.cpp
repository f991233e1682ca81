// Control connections: fixed-size notices, so that one never waits for the rest of another.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "core/error.h"
#include "transports/tcp_control_parts.h"

namespace pycomm::tcp {

Control::Control(int rank, const SharedStanding* standing)
    : rank_(rank),
      standing_(standing),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC)) {
  if (!epoll_ || !wake_) throw Error("tcp: cannot make an epoll: " + error_text(errno));
  epoll_event event = {};
  event.events = EPOLLIN;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
}

Control::~Control() = default;

void Control::add(int rank, const Address& address, Wire wire) {
  auto peer = std::make_unique<Peer>();
  peer->rank = rank;
  peer->address = address;
  peer->wire = std::move(wire);
  watch(*peer);
  peers_.push_back(std::move(peer));
}

void Control::watch(Peer& peer) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.ptr = &peer;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer.wire.get(), &event) != 0) {
    throw Error("tcp: cannot watch a connection: " + error_text(errno));
  }
}

void Control::renew(int rank, uint32_t generation, Wire wire) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = *find(rank);
  if (peer.state != State::here && peer.state != State::cut) return;
  peer.wire = std::move(wire);
  peer.generation = generation;
  peer.in_done = 0;
  watch(peer);
  peer.state.store(State::here, std::memory_order_release);
  if (leaving_) tell(peer, Notice(Notice::Kind::goodbye));
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
    if (events[i].data.ptr != nullptr) take_in(*static_cast<Peer*>(events[i].data.ptr));
  }
}

// Under the mutex.
void Control::take_in(Peer& peer) {
  while (peer.wire) {
    const ssize_t n = peer.wire.receive(reinterpret_cast<uint8_t*>(&peer.in) + peer.in_done,
                                        sizeof peer.in - peer.in_done);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
      peer.in_done += static_cast<size_t>(n);
      if (peer.in_done < sizeof peer.in) continue;
      peer.in_done = 0;
      if (peer.in.magic == Notice::kMagic && peer.in.checksum == peer.in.compute()) {
        on_notice(peer, peer.in);
        continue;
      }
    }
    // The end, or something that no peer of ours would say.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.wire.get(), nullptr);
    peer.wire.reset();
    if (peer.state != State::here) return;
    peer.cut_at = Clock::now();
    peer.state.store(State::cut, std::memory_order_release);
    if (on_cut_) on_cut_({peer.rank, kControl, 0, peer.generation});
  }
}

void Control::on_notice(Peer& peer, const Notice& notice) {
  switch (notice.kind) {
    case Notice::Kind::goodbye:
      peer.state.store(State::left, std::memory_order_release);
      return tell(peer, Notice(Notice::Kind::heard));
    case Notice::Kind::heard:
      peer.heard = true;
      return;
    case Notice::Kind::connect:
      if (notice.lane >= kLanes) return;
      if (notice.socket < 0 && on_ask_) on_ask_(peer.rank, static_cast<int>(notice.lane));
      if (notice.socket >= 0 && on_cut_) {
        on_cut_({peer.rank, static_cast<int>(notice.lane), notice.socket, notice.generation});
      }
      return;
    case Notice::Kind::abort:
      return end_group(notice);
    case Notice::Kind::ask:
      if (standing_) {
        Notice answer(Notice::Kind::standing);
        const Standing standing = standing_->load();
        std::memcpy(answer.text, &standing, sizeof standing);
        tell(peer, answer);
      }
      return;
    case Notice::Kind::standing:
      std::memcpy(static_cast<void*>(&peer.standing), notice.text, sizeof peer.standing);
      peer.answered = true;
      return;
  }
}

// Under the mutex.
void Control::end_group(const Notice& notice) noexcept {
  if (aborted()) return;
  try {
    abort_text_.assign(notice.text, ::strnlen(notice.text, sizeof notice.text));
  } catch (const std::bad_alloc&) {
    abort_text_.clear();
  }
  aborted_.store(true, std::memory_order_release);
  tell_all(notice);
  wake_all();
}

// Never taken back: whoever waits on wait_fd() from now on looks at once.
void Control::wake_all() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

// A notice fits into the socket's buffer, since little else goes this way.
void Control::tell(Peer& peer, Notice notice) noexcept {
  if (!peer.wire) return;
  notice.checksum = notice.compute();
  const ssize_t n = peer.wire.send(&notice, sizeof notice);
  if (n > 0) sent_bytes_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
}

void Control::tell_all(const Notice& notice) noexcept {
  for (const auto& peer : peers_) tell(*peer, notice);
}

void Control::ask_to_connect(int rank, int lane) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Notice notice(Notice::Kind::connect);
  notice.lane = static_cast<uint32_t>(lane);
  tell(*find(rank), notice);
}

void Control::ask_to_connect(const Broken& broken) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Notice notice(Notice::Kind::connect);
  notice.lane = static_cast<uint32_t>(broken.lane);
  notice.socket = broken.socket;
  notice.generation = broken.generation;
  tell(*find(broken.rank), notice);
}

void Control::abort(const std::string& reason) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Notice notice;
  std::snprintf(notice.text, sizeof notice.text, "rank %d aborted: %s", rank_, reason.c_str());
  end_group(notice);
}

void Control::ask() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) peer->answered = false;
  tell_all(Notice(Notice::Kind::ask));
}

Sighting Control::look(int rank) {
  poll();
  std::lock_guard<std::mutex> lock(mutex_);
  const Peer& peer = *find(rank);
  Sighting sighting;
  sighting.standing = peer.standing;
  if (peer.state == State::left) sighting.presence = Sighting::Presence::left;
  if (peer.state == State::died) sighting.presence = Sighting::Presence::died;
  if (peer.state == State::here && peer.answered) sighting.presence = Sighting::Presence::here;
  return sighting;
}

void Control::say_goodbye() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  leaving_ = true;
  tell_all(Notice(Notice::Kind::goodbye));
}

size_t Control::unacknowledged(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return tcp::unacknowledged(find(rank)->wire.get());
}

bool Control::farewell(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return find(rank)->heard;
}

}  // namespace pycomm::tcp
